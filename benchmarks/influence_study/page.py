"""The page that people read: every claim with its rule, result, interval and verdict, and what they mean.

Here: words and tables about estimates; no sentence says more than the estimates beside it. Not here: the estimates.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.influence_study import figures, worlds
from benchmarks.influence_study.claims import BAR, CLAIMS, LEAST, Claim, Estimate, Quantity
from benchmarks.influence_study.statistics import RESAMPLES
from benchmarks.influence_study.subjects import HELD_OUT, REFERENCE_TOKENS, Sizes
from dagster_datamask.reporting.tables import Markdown, human, markdown_table

FILE = "influence-study.md"
NAMES: dict[Any, str] = {worlds.PLACE: "synthetic worlds"}

Found = Mapping[str, Mapping[str, Estimate]]
Results = Sequence[Mapping[str, Any]]

ARMS = (
    ("best", "clean documents of relevant topics"),
    ("individual", "individual top-k (MATES' model)"),
    ("individual in clusters", "individual, in the same clusters"),
    ("group", "relational greedy in clusters (Group-MATES)"),
    ("group without clusters", "relational greedy, no clusters"),
    ("gumbel", "individual, Gumbel top-k (MATES)"),
)


def write(docs: Path, results: Results, speed: Mapping[str, Any], found: Found, sizes: Mapping[str, Sizes]) -> None:
    """The page and its figures into a folder of documentation."""
    pictures = docs / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    for name, drawn in _pictures(results, speed, found).items():
        (pictures / f"influence_{name}.png").write_bytes(drawn)
    (docs / FILE).write_text(_page(results, speed, found, sizes), "utf-8")


def _pictures(results: Results, speed: Mapping[str, Any], found: Found) -> dict[str, bytes]:
    named = {str(NAMES.get(place, place)): estimates for place, estimates in found.items()}
    seeds = [r for r in results if r["place"] != worlds.PLACE or (r["world"] == 0 and r["seed"] == 0)]
    return {
        "models": figures.intervals(
            named,
            [
                ("relational/pooled", "relational − individual"),
                ("relational/within", "… within positions"),
                ("shuffled/pooled", "relational − others' predecessors"),
                ("plain/relational/pooled", "β₁ = 0: relational − individual"),
                ("plain/relational/within", "… within positions"),
                ("similarity/pooled", "cosine − dot"),
                ("bootstrap/mixed", "with bootstrap − random only"),
                ("bootstrap/per policy", "… each policy z-scored"),
            ],
            "Claims 1 to 3: differences of Spearman's ρ on unseen documents, 95 % intervals",
            "difference of ρ",
        ),
        "trajectories": figures.counts(
            named,
            {str(NAMES.get(r["place"], r["place"])): r["counts"] for r in results if len(r["counts"]) > 1},
            "Claim 4: correlation on unseen documents against trajectories to learn from",
        ),
        "overlap": figures.overlaps(
            named,
            {r["place"]: r["chosen"]["from"] for r in results},
            "Claim 5: what individual and brute-force group selection have in common",
        ),
        "choices": figures.paths(
            results, f"Claim 6 and the bar: {_bar_size(results)} chosen, replayed through the language model"
        ),
        "continuation": figures.losses(
            [{**r, "place": NAMES.get(r["place"], r["place"])} for r in results],
            ARMS,
            "Claim 7: held-out reference loss after training on what was selected",
        ),
        "speed": figures.speeds(speed["runs"], "Claim 9: picks in d clusters of random members"),
        "drift": figures.drifts(seeds, "Claim 10: influence of single documents at two checkpoints"),
    }


def _bar_size(results: Results) -> str:
    sizes = dict.fromkeys((r["chosen"]["choose"], r["chosen"]["from"]) for r in results)
    return " or ".join(f"{n} of {of}" for n, of in sizes) + " documents"


def _page(results: Results, speed: Mapping[str, Any], found: Found, sizes: Mapping[str, Sizes]) -> str:
    parts = [
        "# Group-MATES, tested at small scale",
        "This page and its figures are what `make study-influence` found in its last run; nothing on it is written by "
        f"hand. The {len(CLAIMS)} claims, their measures, rules and controls were fixed in "
        "[claims.py](../benchmarks/influence_study/claims.py) before there was a result. A claim counts as "
        "reproduced where the 95 % interval of each of its tests lies where the rule says, and as not decidable here "
        f"with fewer than {LEAST} independent runs. A control decides nothing: it says what a result means.",
        _setting(results, sizes),
        "## All claims",
        _summary(found),
        _in_short(found),
        *(part for claim in CLAIMS for part in _section(claim, results, found)),
        *_bar(results, found),
        *_checks(results, found),
        *_beyond(),
        *_scale(results, speed, sizes),
    ]
    return "\n\n".join(_wrapped(part) for part in parts if part) + "\n"


def _wrapped(part: str) -> str:
    """Paragraphs and lists in lines of 120; headings, tables, pictures and commands as they are."""
    if part.startswith(("#", "|", "!", "```")):
        return part
    return "\n".join(
        textwrap.fill(line, 120, subsequent_indent="  " * line.startswith("- "), break_on_hyphens=False)
        for line in part.split("\n")
    )


def _setting(results: Results, sizes: Mapping[str, Sizes]) -> str:
    runs = [r for r in results if r["place"] == worlds.PLACE]
    count, seeds = len({r["world"] for r in runs}), len({r["seed"] for r in runs})
    model = runs[0]["language_model"]["parameters"]
    said = (
        f"**Synthetic worlds**: {count} worlds of Markov topics, some of them relevant, with {seeds} seeds each of "
        f"language model ({human(model)} parameters), order, trajectories and fit. Intervals resample worlds, seeds "
        f"in a world, and trajectories or pools in a run together."
    )
    texts = [r for r in results if r["place"] != worlds.PLACE]
    if texts:
        said += (
            f" **Real text**: web pages, a language model of {human(texts[0]['language_model']['parameters'])} "
            "parameters trained from scratch on others of them, and an influence model on MiniLM's vectors; the "
            f"reference is {' or '.join(r['place'] for r in texts)}, with a model and a seed of its own. There is one "
            "run of each, so intervals are over what is resampled in it and say nothing of other seeds. Resampling so "
            "few worlds, or three pools, gives an interval that is too narrow rather than too wide."
        )
    else:
        said += " **Real text** was not there in this run."
    return said


def _summary(found: Found) -> str:
    rows = []
    for claim in (*CLAIMS, BAR):
        row: dict[str, Any] = {
            "#": str(claim.number or "bar"),
            "claim": claim.claim,
            "reproduced where the whole interval says": claim.passes,
        }
        for place, estimates in found.items():
            shown = [_shown(estimates[test.key]) for test in claim.tests if test.key in estimates]
            verdict = f"**{claim.verdict(estimates)}**: {'; '.join(shown)}"
            row[NAMES.get(place, place)] = Markdown(verdict) if shown else "–"
        rows.append(row)
    return markdown_table(rows, list(rows[0]))


def _shown(estimate: Estimate) -> str:
    digits = 3 if max(abs(estimate.value), abs(estimate.high - estimate.low) or 0) >= 0.1 else 4
    if math.isnan(estimate.low):
        return f"{estimate.value:+.{digits}f} (one run)"
    return f"{estimate.value:+.{digits}f} [{estimate.low:+.{digits}f}, {estimate.high:+.{digits}f}]"


def _in_short(found: Found) -> str:
    lines = []
    for place, estimates in found.items():
        verdicts: dict[str, list[str]] = {}
        for claim in CLAIMS:
            if any(test.key in estimates for test in claim.tests):
                verdicts.setdefault(claim.verdict(estimates), []).append(str(claim.number))
        told = "; ".join(f"{verdict}: {', '.join(numbers)}" for verdict, numbers in verdicts.items())
        lines.append(f"- {NAMES.get(place, place)}: {told}.")
    return "\n".join(lines)


def _section(claim: Claim, results: Results, found: Found) -> list[str]:
    parts = [
        f"## {claim.number}. {claim.claim}",
        f"{claim.measure}\n\nControl: {claim.control[0].lower()}{claim.control[1:]}",
        _quantities([*claim.tests, *claim.controls], found),
        _read(claim, found),
    ]
    picture = {1: "models", 4: "trajectories", 5: "overlap", 7: "continuation", 9: "speed", 10: "drift"}
    if claim.number in picture:
        name = picture[claim.number]
        parts.append(f"![{claim.claim}](figures/influence_{name}.png)")
    return parts


def _quantities(tests: Sequence[Quantity], found: Found) -> str:
    told = [test for test in tests if any(test.key in estimates for estimates in found.values())]
    columns = {}
    for place, estimates in found.items():
        known = [estimates[test.key] for test in told if test.key in estimates]
        if known:
            columns[f"{NAMES.get(place, place)} ({known[0].units} {known[0].over})"] = estimates
    rows: list[dict[str, Any]] = [
        {"quantity": test.what, "rule": test.rule}
        | {name: _shown(of[test.key]) if test.key in of else None for name, of in columns.items()}
        for test in told
    ]
    return markdown_table(rows, ["quantity", "rule", *columns])


def _read(claim: Claim, found: Found) -> str:
    """One line a place: the verdict, and what the controls say of it."""
    lines = []
    for place, estimates in found.items():
        if not any(test.key in estimates for test in claim.tests):
            continue
        verdict = claim.verdict(estimates)
        words = [_because(claim, estimates, verdict)]
        if claim.number in _READINGS:
            words.append(_READINGS[claim.number](estimates))
        lines.append(f"- {NAMES.get(place, place)}: **{verdict}**. {' '.join(word for word in words if word)}".rstrip())
    return "\n".join(lines)


def _because(claim: Claim, estimates: Mapping[str, Estimate], verdict: str) -> str:
    missing = [test.what for test in claim.tests if test.key not in estimates]
    if missing:
        return f"Not measured: {', '.join(missing)}."
    if verdict == "not decidable here":
        return f"Fewer than {LEAST} runs give no interval."
    told = [(test.what, estimates[test.key]) for test in claim.tests if not test.passes(estimates[test.key])]
    failed = [f"{what} is {_shown(estimate)}" for what, estimate in told]
    return f"Against the rule: {'; '.join(failed)}." if failed else ""


def _above(estimate: Estimate) -> bool:
    return estimate.low > 0


def _below(estimate: Estimate) -> bool:
    return estimate.high < 0


def _sign(estimate: Estimate, up: str, down: str, neither: str) -> str:
    return up if _above(estimate) else down if _below(estimate) else neither


def _relational(e: Mapping[str, Estimate]) -> str:
    gain, plain = e["relational/pooled"], e["plain/relational/pooled"]
    inside, plain_inside = e["relational/within"], e["plain/relational/within"]
    words = [
        _sign(
            e["shuffled/pooled"],
            "The model uses the predecessors it is given: with another trajectory's it ranks worse.",
            "With another trajectory's predecessors it ranks better than with its own.",
            "That another trajectory's predecessors serve it worse than its own cannot be told.",
        )
    ]
    if _above(gain) and not _above(inside):
        words.append(
            "Within positions there is no gain that could be told from none: what is gained lies between positions, of "
            "which the bracket sets the first apart."
        )
    if _above(gain) and not _above(plain):
        words.append(
            f"Without Adam's momentum no pooled gain is left that could be told from none, {_shown(plain)}; successive "
            f"increments, which correlate by {e['carry/momentum'].value:+.2f} with it, correlate by "
            f"{e['carry/plain'].value:+.2f}. So what the relation predicts here comes with the gradients that the "
            "optimizer carries on from the predecessors, and is no evidence that documents interact."
        )
    elif _above(plain):
        words.append(
            f"With β₁ = 0 the pooled gain is {_shown(plain)}, within positions {_shown(plain_inside)}"
            + (": a gain between positions again." if not _above(plain_inside) else ".")
        )
    if _below(plain_inside):
        words.append(f"With β₁ = 0 it ranks worse within positions, {_shown(plain_inside)}.")
    if not (_above(gain) and _above(inside)) and not _above(e["planted/pooled"]):
        words.append(
            "On as many trajectories a relation that was planted into these features is not told from none either, so "
            "this says no more than that so few do not show one."
        )
    return " ".join(words)


def _bootstrap(e: Mapping[str, Estimate]) -> str:
    words = []
    if _above(e["bootstrap/mixed"]):
        words.append(
            _sign(
                e["bootstrap/per policy"],
                "It stays where each policy is z-scored by itself, so it is not only a difference of the policies' "
                "means.",
                "Where each policy is z-scored by itself it turns round: the model has learned which policy has which "
                "mean, and ranks worse within them.",
                "Where each policy is z-scored by itself nothing is left that could be told from 0: the gain is that "
                "of the policies' means.",
            )
        )
    if _below(e["bootstrap/random"]):
        words.append("On random trajectories alone the model with bootstrap is worse.")
    if _above(e["bootstrap/individual"]):
        words.append("The individual model gains from bootstrap trajectories as well.")
    return " ".join(words)


def _trajectories(e: Mapping[str, Estimate]) -> str:
    if not _above(e["trajectories/all"]):
        return "That the most are better than the fewest cannot be told, so there is no saturation to speak of."
    return _sign(
        e["trajectories/bend"],
        "The last increase is larger than the first: no saturation yet.",
        "The last increase is smaller than the first: it saturates.",
        "Whether it saturates cannot be told from this.",
    )


def _overlap(e: Mapping[str, Estimate]) -> str:
    last = e["overlap/last beside random"]
    if math.isnan(last.low):
        share = e["overlap/last"].value
        return f"At the largest n the two share {share:.2f}; by chance it would be {share - last.value:.2f}."
    return _sign(
        last,
        f"Even at the largest n they share more than chance would: {_shown(e['overlap/last'])}.",
        "At the largest n they share less than chance would.",
        "At the largest n they share no more than chance would.",
    )


def _approximation(e: Mapping[str, Estimate]) -> str:
    words = []
    if not _below(e["chosen/individual"]):
        words.append(
            _sign(
                e["chosen/individual"],
                "The individual model's choice lowers the reference loss more.",
                "",
                "The two choices cannot be told apart.",
            )
        )
    words.append(
        _sign(
            e["chosen/plain/individual"],
            "With β₁ = 0 the individual model's choice is the better one.",
            "With β₁ = 0 the relational choice is the better one, too."
            if _below(e["chosen/individual"])
            else "With β₁ = 0 the relational choice is the better one.",
            "With β₁ = 0 the two cannot be told apart.",
        )
    )
    return " ".join(words)


def _continuation(e: Mapping[str, Estimate]) -> str:
    words = [
        _sign(
            e["continued/individual"],
            "Individual top-k leads to the lower loss.",
            "",
            "The two cannot be told apart.",
        ),
        _sign(
            e["continued/same clusters"],
            "In the same clusters and budgets the individual choice leads to the lower loss.",
            "In the same clusters and budgets the relation helps.",
            "In the same clusters and budgets they cannot be told apart.",
        ),
    ]
    free = e["continued/no clusters"]
    words.append(
        _sign(
            free,
            f"Without clusters the relational greedy is the worse one, {_shown(free)}.",
            f"Without clusters the relational greedy is the better one, {_shown(free)}, so it is the proportional "
            "budgets of clusters that cost it."
            if not _below(e["continued/individual"])
            else f"Without clusters the relational greedy is better, too, {_shown(free)}.",
            f"Without clusters the difference is {_shown(free)}.",
        )
    )
    words.append(
        _sign(
            e["continued/random"],
            "The group's selection is worse than a random one.",
            "The group's selection is better than a random one.",
            "The group's selection cannot be told from a random one.",
        )
    )
    return " ".join(word for word in words if word)


def _clusters(e: Mapping[str, Estimate]) -> str:
    return (
        f"R is {e['inside/learned'].value:+.2f} inside clusters and {e['across/learned'].value:+.2f} ± "
        f"{e['across sd/learned'].value:.2f} across; in the encoder's space {e['inside/encoder'].value:+.2f} and "
        f"{e['across/encoder'].value:+.2f}; a random partition has {e['inside/partition'].value:+.2f} and "
        f"{e['across/partition'].value:+.2f}."
    )


def _speed(e: Mapping[str, Estimate]) -> str:
    return (
        f"The products that are taken fall with a slope of {e['speed/products'].value:.2f}; seconds hold more than "
        "products, and what else the machine did (its load stands under Scale)."
    )


_READINGS: dict[int, Callable[[Mapping[str, Estimate]], str]] = {
    1: _relational,
    3: _bootstrap,
    4: _trajectories,
    5: _overlap,
    6: _approximation,
    7: _continuation,
    8: _clusters,
    9: _speed,
}


def _bar(results: Results, found: Found) -> list[str]:
    lines = []
    for place, estimates in found.items():
        if math.isnan(estimates["bar/individual"].low):
            lines.append(f"- {NAMES.get(place, place)}: one run, so no interval.")
            continue
        failed = [test.what.split(" − ")[1] for test in BAR.tests if not test.passes(estimates[test.key])]
        if not failed:
            lines.append(f"- {NAMES.get(place, place)}: the bar is met.")
            continue
        behind = estimates["bar/brute force"].value
        lines.append(
            f"- {NAMES.get(place, place)}: the bar is **not met** against {' and '.join(failed)}. On more pools "
            f"(claim 6) the difference to the individual model is {_shown(estimates['chosen/individual'])} and to "
            f"random {_shown(estimates['chosen/random'])}. Brute force, which measures what both models predict for "
            f"documents that they have not seen, is ahead of the relational greedy by {behind:.4f}."
        )
    return [
        f"## The bar: {_bar_size(results)}, against brute force",
        BAR.measure,
        _quantities([*BAR.tests, *BAR.controls], found),
        "\n".join(lines),
        "![Sums of true increments by way of choosing](figures/influence_choices.png)",
    ]


def _checks(results: Results, found: Found) -> list[str]:
    check = {key: _shown(value) for key, value in found[worlds.PLACE].items() if key.startswith("check/")}
    told = _sign(found[worlds.PLACE]["check/gain"], "found", "missed", "not told from none")
    lines = [
        f"- Where Eq. 13 itself makes the increments, from vectors that the fit is given, the relation is {told}: ρ is "
        f"{check['check/relational']} for the relational model and {check['check/individual']} for the individual one, "
        f"a difference of {check['check/gain']}; the law without its noise reaches {check['check/law']}."
    ]
    for place, e in found.items():
        told = _sign(e["planted/pooled"], "found", "missed", "not told from none")
        lines.append(
            f"- {NAMES.get(place, place)}: where the vectors have to be learned from this place's own features, on as "
            f"many trajectories as the claims have, a planted relation is {told} ({_shown(e['planted/pooled'])} over "
            f"the individual model). One checkpoint probed twice agrees "
            f"with itself by {e['drift/same'].value:.6f}."
        )
    ahead = all(
        run["brute force"] <= min(result["chosen"]["sums"][kind][k] for kind in ("relational", "individual", "random"))
        for result in results
        for k, run in enumerate(result["chosen"]["forced"])
    )
    lines.append(
        "- Brute force reached the lowest sum of all choices in every run."
        if ahead
        else "- Brute force did not reach the lowest sum in every run: it is greedy, not exhaustive."
    )
    lines.append(
        "- The rollouts are compared with a plain loop in `tests/influence`, the running-sum greedy with one that "
        "takes averages anew, Eq. 13 with its sum written out."
    )
    return ["## Checked before anything was called not reproduced", "\n".join(lines)]


def _beyond() -> list[str]:
    return [
        "## What cannot be tested here",
        "Scores on DCLM's Core tasks, tokens saved up to a target, the GPU hours of the paper's tables, one text "
        "encoder against another, and anything about how gains change with the size of the model: two cores train "
        "models of a hundred thousand and of one and a half million parameters, and those pass no benchmark. What "
        "stands above are rank correlations, reference losses and the cost of selection, on these models.",
    ]


def _scale(results: Results, speed: Mapping[str, Any], sizes: Mapping[str, Sizes]) -> list[str]:
    kinds = {worlds.PLACE: "a synthetic world", **{p: "real text" for p in sizes if p != worlds.PLACE}}
    columns = {name: sizes[place] for place, name in kinds.items() if place in sizes}
    shown: tuple[tuple[str, Callable[[Sizes], Any]], ...] = (
        (
            "layers × width, context, vocabulary",
            lambda s: f"{s.model.layers} × {s.model.width}, {s.model.context}, {s.model.vocabulary}",
        ),
        ("warm-up, steps × sequences; to the later checkpoint", lambda s: f"{s.warm_up} × {s.batch}; + {s.later}"),
        ("reference; held-out reference, documents", lambda s: f"{s.reference}; {s.held_out}"),
        ("trajectories (claim 4)", lambda s: " / ".join(map(str, s.counts))),
        ("trajectories for all other claims; of them bootstrap", lambda s: f"{s.main}; {s.bootstrap}"),
        ("trajectories with β₁ = 0; validation; test", lambda s: f"{s.plain}; {s.validation}; {s.test}"),
        ("steps of a trajectory; K", lambda s: f"{s.steps}; {s.extreme}"),
        ("documents to probe; to select from", lambda s: f"{s.probe:,}; {s.pool:,}"),
        ("brute force: n of N; pools replayed", lambda s: f"{s.choose} of {s.choose_from}; {s.pools}"),
        ("selected; clusters; steps after it", lambda s: f"{s.share:.0%}; {s.clusters}; {s.go_on}"),
        ("influence model", lambda s: f"{s.hidden or 'no'} hidden units, {s.width} wide, {s.epochs} epochs"),
    )
    rows = [{"": what} | {name: of(size) for name, size in columns.items()} for what, of in shown]
    machine = results[0]["machine"]
    seconds = sum(result["cpu_seconds"] for result in results)
    return [
        "## Scale",
        markdown_table(rows, ["", *columns]),
        f"Documents for warm-up, for learning ({HELD_OUT:.0%} of them to choose the epoch by), for the test and to "
        f"select from have none in common; no two random test trajectories share one. A reference text is "
        f"{REFERENCE_TOKENS} tokens. Intervals are of {RESAMPLES:,} keyed resamples. A dot product or a clamped "
        f"bracket starts from α = β = 1 like the others. The paper probes with 20,000 trajectories and models of 400 "
        f"million parameters and more.",
        "Two worlds were run and looked at before the sizes above were settled, with 20 topics over 128 tokens, of "
        "which the language model had learned next to nothing (loss 4.6, by chance 4.85), and 300 trajectories to "
        "learn from. There, relational − individual was +0.24 and +0.29 pooled, each interval above 0, and −0.02 "
        "twice with β₁ = 0; cosine − dot was +0.26 and +0.17, group − individual after training +0.08 and +0.06. The "
        "worlds were then made such as the model can learn, and the trajectories fewer, so that the whole takes "
        "twenty minutes. No claim, rule or control was changed.",
        f"The subjects took {seconds / 60:.0f} minutes of processor time together, and the clusters' seconds were "
        f"measured, on {machine['cores']} cores of {machine['cpu'] or 'a machine that does not tell its processor'} "
        f"(load {machine['load']:.1f} when the first began, {speed['machine']['load']:.1f} before the clusters), "
        f"Python {machine['python']}, NumPy {machine['numpy']}.",
        "```bash\nmake study-influence   # goes on where a stopped run ended; results in .benchmarks/influence\n```",
    ]
