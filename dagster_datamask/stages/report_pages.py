"""The sections that both reports share: numbers to figures, tables and captions that say what to see.

Here: what stands on a page. Not here: where the numbers come from (`report_numbers`), how a figure is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dagster_datamask.reporting.html import Section
from dagster_datamask.reporting.selections import (
    cluster_map_figure,
    hosts_figure,
    lengths_figure,
    overlap_figure,
    quality_change_figure,
    selections_map_figure,
    strategies_figure,
)
from dagster_datamask.reporting.tables import human, markdown_table, png_markdown
from dagster_datamask.shards.schemas import DECISIONS
from dagster_datamask.stages.report_numbers import (
    DIVERSITY,
    EVERYTHING,
    GROUPS,
    LENGTHS,
    QUALITY,
    RANDOM,
    Numbers,
    Strategies,
)

PAGE = "report"
_HOSTS_SHOWN = 15
_NAMES = {"scored": "scored", "choosable": "to choose from", "kept": "kept"}
_MEANING = {
    "kept": "in the mask",
    "not_selected": "could have been chosen, and was not",
    "pruned": "quality below the cut",
    "duplicate": "its id or its text came before, or a kept document says the same",
    "contaminated": "holds text of a benchmark",
    "unscored": "a classifier gave no score",
    "bad_embedding": "the encoder gave no vector",
    "bad_row": "no usable text",
}


@dataclass(frozen=True)
class Figure:
    """A figure with its heading, what to see in it, and its numbers as a table where there are few."""

    heading: str
    caption: str
    png: bytes
    table: str = ""

    def section(self) -> Section:
        if not self.table:
            return self.heading, self.caption, self.png
        return self.heading, "\n\n".join((self.caption, png_markdown(self.png, self.heading), self.table)), None


def in_short(what: str, numbers: Numbers) -> Section:
    """What became of the documents, in sentences and as a table of decisions."""
    every = sum(numbers.decisions.values())
    scored, choosable, kept = (numbers.groups[name] for name in ("scored", "choosable", "kept"))
    if not every:
        return "In short", f"{what} holds no readable document: there is nothing to select and nothing to show.", None
    lines = [
        f"Of {every:,} readable documents {scored.documents:,} have a quality; there were {choosable.documents:,} to "
        f"choose from, and {kept.documents:,} are kept"
        + (f": {100 * kept.documents / scored.documents:.1f} % of the scored ones." if scored.documents else ".")
    ]
    if kept.mean_quality is not None:
        lines.append(
            f"Mean quality rises from {scored.mean_quality:.2f} (scored) over {choosable.mean_quality:.2f} (to choose "
            f"from) to **{kept.mean_quality:.2f}** (kept), of 15."
            if kept.mean_quality >= (choosable.mean_quality or 0)
            else f"Mean quality is {scored.mean_quality:.2f} (scored), {choosable.mean_quality:.2f} (to choose from) "
            f"and **{kept.mean_quality:.2f}** (kept), of 15."
        )
    before, after = numbers.cosine("choosable"), numbers.cosine("kept")
    if before is not None and after is not None:
        lines.append(
            f"Two documents that could be chosen have a mean cosine of {before:.3f}, two that are kept "
            f"**{after:.3f}**: what is kept is {'more' if after < before else 'less'} diverse than what it was chosen "
            "from."
        )
        without = kept.documents - numbers.embedded["kept"]
        if without:
            lines[-1] += (
                f" That is of those with a vector; {without:,} of the kept ones have none, pruned as they were."
            )
    if kept.documents and not kept.uncounted:
        lines.append(f"The kept documents hold {human(kept.tokens)} tokens, {human(kept.mean_tokens)} each on average.")
    decisions = [
        {
            "decision": name,
            "documents": numbers.decisions[name],
            "share": f"{100 * numbers.decisions[name] / every:.1f} %",
            "meaning": _MEANING[name],
        }
        for name in DECISIONS
        if numbers.decisions[name]
    ]
    table = markdown_table(decisions, ["decision", "documents", "share", "meaning"])
    return "In short", "\n".join(f"- {line}" for line in lines) + f"\n\n{table}", None


def certificate_in_words(facts: Mapping[str, Any], of: str) -> str:
    """Value, baseline, bound, gap and share of published masks in words, and as a table.

    facts: those of a mask or of corpus_selection_state; `of`: what the mask was chosen from.
    """
    certificate = facts["certificate"]
    if facts["lambda"] is None:
        return f"Nothing is maximised, so there is no bound to compare the mask with: {certificate['reason']}."
    value, bound, gap = facts["value"], certificate["upper_bound"], certificate["gap"]
    baseline, share, reason = (certificate[key] for key in ("baseline", "share", "reason"))
    numbers = {
        "quality, on the objective's scale": facts["quality"],
        # elsewhere on the page cosines are of two different documents; the corpus is solved for no other diversity
        "diversity" + (", each document with itself too" if facts.get("objective", "pws") == "pws" else ""): facts[
            "diversity"
        ],
        "value": value,
        "baseline": baseline,
        "bound": bound,
        "gap": gap,
        "share, in %": None if share is None else 100 * share,
    }
    rows = [{"": name, "of the mask": f"{number:.8g}"} for name, number in numbers.items() if number is not None]
    table = markdown_table(rows, ["", "of the mask"])
    maximised = f"What is maximised is λ · quality + (1 − λ) · diversity with λ = {facts['lambda']:g}, of {of}."
    if value is None or bound is None or gap is None:
        return f"{maximised} There is no bound to compare the mask with: {reason}.\n\n{table}"
    words = (
        f"{maximised} The mask is worth **{value:.6g}** (value). It is proven that no mask of its size is worth more "
        f"than **{bound:.6g}** (bound), so at most {gap:.1e} is left to gain (gap)."
    )
    if share is None:
        return f"{words} Choosing has nothing to gain over chance here{f': {reason}' if reason else ''}.\n\n{table}"
    return (
        f"{words} A mask drawn at random from the same documents is worth {baseline:.6g} in expectation (baseline): of "
        f"all that choosing can gain over chance, **{100 * share:.2f} %** is gained (share).\n\n{table}"
    )


def figures(
    what: str,
    numbers: Numbers,
    found: Strategies,
    centroids: np.ndarray,
    hosts: Sequence[Mapping[str, Any]],
    counted: tuple[int, int] | None,
) -> list[Figure]:
    """The figures of a pool. centroids: float32[k, d]; hosts: the largest, with `scored` and `kept`; counted: how many
    hosts there are before and after, None where unknown."""
    return [
        _quality(what, numbers),
        *_published(what, numbers),
        *_of_the_sample(what, numbers, found),
        _clusters(what, numbers, centroids),
        _lengths(what, numbers),
        _hosts(what, numbers, hosts, counted),
    ]


def _quality(what: str, numbers: Numbers) -> Figure:
    groups = {name: numbers.groups[name] for name in GROUPS}
    return Figure(
        "Quality before and after",
        "Every document's quality, rounded. The grey line is what was scored; pruning cuts its left end off, which "
        "leaves the orange one; the bars are what the mask keeps. How far the bars lie to the right of the orange line "
        "is the quality gained by choosing; the higher the weight of diversity, the less.",
        quality_change_figure(
            {_NAMES[name]: group.quality.tolist() for name, group in groups.items()},
            {_NAMES[name]: group.mean_quality for name, group in groups.items()},
            f"{what}: quality of the documents",
        ),
    )


def _published(what: str, numbers: Numbers) -> list[Figure]:
    """The published selections beside each other, where there is more than one."""
    names, rows = numbers.selections, numbers.selected()
    if len(names) < 2:
        return []
    pool = numbers.groups["choosable"]
    points = [{"name": EVERYTHING, "quality": pool.mean_quality, "cosine": numbers.cosine("choosable")}]
    points += [{"name": r["selection"], "quality": r["mean quality"], "cosine": r["mean cosine"]} for r in rows]
    shown = [
        row
        | {"mean tokens": _rounded(row["mean tokens"], 1)}
        | {"mean quality": _rounded(row["mean quality"])}
        | {"mean cosine": _rounded(row["mean cosine"], 4)}
        for row in rows
    ]
    pairs = [
        row | {name: _rounded(row[name]) for name in ("jaccard", "share of a", "share of b")}
        for row in numbers.overlaps()
    ]
    sizes = np.diag(numbers.shared).astype(np.float64)[:, None]
    shares = np.divide(numbers.shared, sizes, out=np.full(numbers.shared.shape, np.nan), where=sizes > 0)
    return [
        Figure(
            "Published selections, beside each other",
            f"Right is better, and up is better. All documents of each selection count, not a sample; {names[0]} is "
            "what is kept, the others were made at the same budget. Diversity is that of the documents with a vector: "
            "where they are fewer than there are documents, the others were pruned (embed.documents = all gives them "
            "one, too).",
            strategies_figure(points, f"{what}: selections at one budget"),
            markdown_table(shown, list(shown[0])),
        ),
        Figure(
            "How far the published selections agree",
            "The share of the row's documents that the column holds too; below, each pair with the documents that are "
            "in both and Jaccard's index, the share of those in either that are in both.",
            overlap_figure(names, shares, f"{what}: overlap of the published selections"),
            markdown_table(pairs, list(pairs[0])),
        ),
    ]


def _of_the_sample(what: str, numbers: Numbers, found: Strategies) -> list[Figure]:
    own, n = found.own, len(found.table)
    size, every = int(found.masks[own].sum()), numbers.embedded["choosable"]
    embedded = " with a vector" if every < numbers.groups["choosable"].documents else ""
    sample = (
        f"all {n:,} documents{embedded} that could be chosen"
        if n == every
        else f"a sample of {n:,} of the {every:,} documents{embedded} that could be chosen, drawn by the hash of their "
        "ids"
    )
    gaps = [s.certificate.gap for name, s in found.solved.items() if name != RANDOM and s.certificate.gap is not None]
    solved = (
        f"{QUALITY} (λ = 1) and {DIVERSITY} (λ = 0) are solved on {'them' if n == every else 'the sample'} by the "
        f"certified solver for the {size:,} documents that {own} keeps there"
        + (f" (gap at most {max(gaps):.0e})" if gaps and size else "")
        + f"; {RANDOM} keeps as many by the hash of their ids."
    )
    names = list(found.masks)
    rows = [
        {
            "mask": row["name"],
            "documents": row["documents"],
            "mean quality": _rounded(row["quality"]),
            "mean cosine": _rounded(row["cosine"], 4),
            "mean tokens": _rounded(row["tokens"], 1),
        }
        for row in found.worth()
    ]
    chance = f"{100 * size / n:.0f} %" if n else "nothing"
    shown = {EVERYTHING: np.ones(n, bool), **{name: found.masks[name] for name in (own, QUALITY, DIVERSITY)}}
    return [
        Figure(
            "Quality and diversity, weighed against each other",
            f"Right is better, and up is better; measured on {sample}. No mask of this size lies further right than "
            f"{QUALITY}, and hardly one further up than {DIVERSITY}: the corner between them is out of reach. See how "
            f"near {own} comes to it, and how far from {RANDOM}. {solved}",
            strategies_figure(
                found.worth(), f"{what}: {human(size)} of {human(n)} documents, chosen in different ways"
            ),
            markdown_table(rows, list(rows[0])),
        ),
        Figure(
            "A map of the documents",
            f"t-SNE of the embeddings of {sample}: neighbours say similar things, distances between far groups mean "
            f"little. In colour is what a selection keeps. Look for regions that {QUALITY} crowds and for those that "
            f"it leaves empty; {DIVERSITY} takes from the edges, where documents are unlike the rest. Where {own} "
            f"has colour in a region that {QUALITY} leaves, diversity has brought it in. {solved}",
            selections_map_figure(found.places, shown, f"{what}: which regions each selection reaches"),
        ),
        Figure(
            "How far the selections agree",
            f"The share of the row's documents that the column chose too, on {sample}. By chance it would be {chance}. "
            f"{own} near to 100 % in one column means that this aim alone decides; near to chance in a column, that "
            "it plays no part.",
            overlap_figure(names, found.overlap(), f"{what}: overlap of the selections"),
        ),
    ]


def _clusters(what: str, numbers: Numbers, centroids: np.ndarray) -> Figure:
    pool, kept, quality = numbers.clusters
    total = numbers.vectors["choosable"]
    typicality = centroids.astype(np.float64) @ (total / max(float(np.linalg.norm(total)), 1e-300))
    mean = np.divide(quality, pool, out=np.zeros(len(pool)), where=pool > 0)
    title = f"{what}: clusters by quality and by how typical they are"
    return Figure(
        "Quality and diversity by cluster",
        "Clusters of similar documents, sorted into cells: further right means better documents, further up means "
        "more like the pool's average, so less to add to its diversity. The left map says where the documents are, the "
        "right one how many of them are kept. A mask that weighs both keeps most at the lower right (good and unusual) "
        "and least at the upper left; one that weighs quality alone keeps by column, diversity alone by row. Along the "
        "axes stands each bin's median cluster.",
        cluster_map_figure(mean, typicality, pool.astype(np.int64), kept.astype(np.int64), title),
    )


def _lengths(what: str, numbers: Numbers) -> Figure:
    groups = {name: numbers.groups[name] for name in GROUPS}
    rows = [
        {
            "documents": _NAMES[name],
            "number": group.documents,
            "tokens": group.tokens,
            "mean tokens": _rounded(group.mean_tokens, 1),
            "without a count": group.uncounted,
        }
        for name, group in groups.items()
    ]
    return Figure(
        "Lengths",
        "Documents by their number of tokens, as the source counts them; on the left every document counts once, on "
        "the right by its tokens. Where the blue line lies to the right of the others, longer documents are kept, and "
        "a budget of documents buys more tokens than its share; where to the left, fewer.",
        lengths_figure(
            LENGTHS,
            {_NAMES[name]: group.lengths.tolist() for name, group in groups.items()},
            f"{what}: lengths of the documents",
        ),
        markdown_table(rows, list(rows[0])),
    )


def _hosts(what: str, numbers: Numbers, hosts: Sequence[Mapping[str, Any]], counted: tuple[int, int] | None) -> Figure:
    scored, kept = (max(1, numbers.groups[name].documents) for name in ("scored", "kept"))
    rows = [
        {
            "host": host["host"],
            "before": host["scored"] / scored,
            "after": host["kept"] / kept,
        }
        for host in hosts[:_HOSTS_SHOWN]
    ]
    say = f" Hosts with scored documents: {counted[0]:,}; with kept ones: {counted[1]:,}." if counted and hosts else ""
    return Figure(
        "Hosts",
        "The hosts with the most documents. A blue diamond to the right of the grey dot: the host's share grew; at 0: "
        f"nothing of it is kept.{say} Topics are left out: the documents carry no labels of them.",
        hosts_figure(rows, f"{what}: the largest hosts"),
    )


def _rounded(number: float | None, digits: int = 3) -> float | None:
    return None if number is None else round(number, digits)
