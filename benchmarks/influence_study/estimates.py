"""From what was measured to every quantity that a claim names, with its interval.

Here: which difference is taken of which numbers. Not here: how intervals are made (`statistics`), and what they have to
show (`claims`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.influence_study import worlds
from benchmarks.influence_study.claims import Estimate
from benchmarks.influence_study.statistics import (
    RESAMPLES,
    interval,
    multiplicities,
    nested,
    resampled_mean,
    resampled_spearman,
    resampled_within,
    slope,
)

# {key: float64[1 + B] replicates of a subject, the first its own; of length 1 where a run has one such number}
Replicates = dict[str, np.ndarray]
Resampled = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def replicates(result: Mapping[str, Any], resamples: int = RESAMPLES) -> Replicates:
    """Of one subject's file."""
    found: Replicates = {}
    for part in (correlations, increases, chosen, continued, related, drift):
        found |= part(result, resamples)
    return found


def estimates(results: Sequence[Mapping[str, Any]], parts: Sequence[Replicates]) -> dict[str, dict[str, Estimate]]:
    """{place: {key: estimate}}: worlds together, nested; each text by itself, over what was resampled within it."""
    found: dict[str, dict[str, Estimate]] = {}
    in_worlds = [(r, p) for r, p in zip(results, parts, strict=True) if r["place"] == worlds.PLACE]
    if in_worlds:
        found[worlds.PLACE] = {}
        for key in dict.fromkeys(key for _, part in in_worlds for key in part):
            runs = {(r["world"], r["seed"]): p[key] for r, p in in_worlds if key in p}
            found[worlds.PLACE][key] = nested(runs, "runs of worlds × seeds", key)
    for result, part in zip(results, parts, strict=True):
        if result["place"] != worlds.PLACE:
            found[result["place"]] = {key: _alone(values, result, key) for key, values in part.items()}
    return found


def _alone(values: np.ndarray, result: Mapping[str, Any], key: str) -> Estimate:
    if len(values) == 1:
        return Estimate(float(values[0]), float("nan"), float("nan"), 1, "run")
    units, over = result["test"], "test trajectories"
    if key.startswith(("bar/", "overlap/")):
        units, over = len(result["chosen"]["forced"]), f"pools of {result['chosen']['from']}"
    elif key.startswith("chosen/"):
        units, over = len(result["chosen"]["sums"]["random"]), f"pools of {result['chosen']['from']}"
    elif key.startswith("continued/"):
        units, over = len(result["continued"]["losses"]["group"]["documents"]), "held-out reference documents"
    elif key.startswith("drift/"):
        units, over = len(result["drift"]["first"]), "documents"
    return interval(values, units, over)


def correlations(result: Mapping[str, Any], resamples: int) -> Replicates:
    """Claims 1 to 3."""
    random, boot = (_Test(result["tests"][policy], resamples, result["name"]) for policy in ("random", "bootstrap"))
    plain = _Test(result["plain"], resamples, result["name"])
    planted = _Test(result["planted"], resamples, result["name"])
    mixed = _Test(_mixed(result["tests"]), resamples, result["name"])
    apart = _Test(_mixed(result["tests"], standardised=True), resamples, result["name"])
    found: Replicates = {}
    for kind, how in (("pooled", resampled_spearman), ("within", resampled_within)):
        cosine, single, clamped = (random.rho(name, how) for name in ("cosine", "individual", "clamped"))
        found |= {
            f"individual/{kind}": single,
            f"cosine/{kind}": cosine,
            f"relational/{kind}": cosine - single,
            f"shuffled/{kind}": random.rho("cosine", how, where="shuffled") - random.rho("shuffled", how),
            f"plain/relational/{kind}": plain.rho("cosine", how) - plain.rho("individual", how),
            f"similarity/{kind}": clamped - random.rho("dot", how),
            f"dot/{kind}": random.rho("dot", how) - single,
            f"clamped/{kind}": clamped - cosine,
        }
    pooled = resampled_spearman
    found["planted/pooled"] = planted.rho("relational", pooled) - planted.rho("individual", pooled)
    for name, test in (("mixed", mixed), ("per policy", apart), ("random", random), ("bootstrap", boot)):
        found[f"bootstrap/{name}"] = test.rho("with bootstrap", pooled) - test.rho("cosine", pooled)
    found["bootstrap/individual"] = mixed.rho("individual with bootstrap", pooled) - mixed.rho("individual", pooled)
    found["carry/momentum"], found["carry/plain"] = random.carry(), plain.carry()
    return found


def increases(result: Mapping[str, Any], resamples: int) -> Replicates:
    """Claim 4, where a subject has several numbers of trajectories."""
    counts, main = result["counts"], result["main"]
    test = _Test(result["tests"]["random"], resamples, result["name"])

    def rho(mode: str, count: int) -> np.ndarray:
        return test.rho(mode if count == main else f"{mode} {count}", resampled_spearman)

    if len(counts) < 2:
        return {}
    found = {count: rho("cosine", count) for count in counts}
    steps = [found[b] - found[a] for a, b in pairwise(counts)]
    return (
        {f"count/{count}": values for count, values in found.items()}
        | {f"count/individual {count}": rho("individual", count) for count in counts}
        | {f"trajectories/{k}": step for k, step in enumerate(steps, 1)}
        | {
            "trajectories/all": found[counts[-1]] - found[counts[0]],
            "trajectories/bend": steps[-1] - steps[0],
            "trajectories/individual": rho("individual", counts[-1]) - rho("individual", counts[0]),
        }
    )


def chosen(result: Mapping[str, Any], resamples: int) -> Replicates:
    """Claims 5 and 6, and the bar."""
    found: Replicates = {}
    for name, part in (("chosen", result["chosen"]), ("chosen/plain", result["plain"]["chosen"])):
        sums = {kind: np.array(values, np.float64) for kind, values in part["sums"].items()}

        def difference(a: str, b: str, sums: dict[str, np.ndarray] = sums) -> np.ndarray:
            return resampled_mean(sums[a] - sums[b], resamples, result["name"], "pools")

        found[f"{name}/individual"] = difference("relational", "individual")
        found[f"{name}/random"] = difference("relational", "random")
        if name == "chosen":
            found["chosen/individual beside random"] = difference("individual", "random")
            found["chosen/one relation"] = difference("relational", "one relation")
    forced = result["chosen"]["forced"]
    sums = result["chosen"]["sums"]

    def mean(values: Sequence[float]) -> np.ndarray:
        return resampled_mean(values, resamples, result["name"], "forced") if len(values) > 1 else _mean(values)

    for other in ("individual", "random"):
        found[f"bar/{other}"] = mean([sums["relational"][k] - sums[other][k] for k in range(len(forced))])
    for other in ("brute force", "oracle individual"):
        found[f"bar/{other}"] = mean([sums["relational"][k] - run[other] for k, run in enumerate(forced)])
    shares = {int(n): [run["overlap"][n] for run in forced] for n in forced[0]["overlap"]}
    last, size = max(shares), result["chosen"]["from"]
    doublings = [n for n in sorted(shares) if n > 1]
    slopes = [slope(np.log2(doublings), [shares[n][k] for n in doublings]) for k in range(len(forced))]
    return (
        found
        | {f"overlap/{n}": mean(values) for n, values in shares.items()}
        | {
            "overlap/slope": mean(slopes),
            "overlap/last": mean(shares[last]),
            "overlap/last beside random": mean(shares[last]) - last / size,
        }
    )


def continued(result: Mapping[str, Any], resamples: int) -> Replicates:
    """Claim 7. In a world a run is one number; for a text, of which there are too few, documents are resampled."""
    losses = {name: np.array(found["documents"], np.float64) for name, found in result["continued"]["losses"].items()}
    losses["random"] = np.mean([values for name, values in losses.items() if name.startswith("random ")], axis=0)

    def difference(a: str, b: str) -> np.ndarray:
        values = losses[a] - losses[b]
        if result["place"] == worlds.PLACE:
            return _mean(values)
        return resampled_mean(values, resamples, result["name"], "reference")

    return {
        "continued/individual": difference("group", "individual"),
        "continued/same clusters": difference("group", "individual in clusters"),
        "continued/no clusters": difference("group without clusters", "individual"),
        "continued/gumbel": difference("group", "gumbel"),
        "continued/random": difference("group", "random"),
        "continued/individual beside random": difference("individual", "random"),
    } | {f"loss/{name}": _mean(values) for name, values in losses.items() if not name.startswith("random ")}


def related(result: Mapping[str, Any], resamples: int) -> Replicates:
    """Claim 8."""
    found = {}
    for space, part in result["clusters"].items():
        for side in ("inside", "across"):
            mean, sd = part[side]
            found[f"{side}/{space}"], found[f"{side} sd/{space}"] = _mean([mean]), _mean([sd])
    return found


def drift(result: Mapping[str, Any], resamples: int) -> Replicates:
    """Claim 10."""
    first, again, later = (_numbers(result["drift"][name])[:, None] for name in ("first", "again", "later"))
    times = multiplicities(len(first), resamples, result["name"], "drift")
    return {
        "drift/checkpoints": resampled_spearman(first, later, times),
        "drift/same": resampled_spearman(first, again, times),
    }


def speed(runs: Sequence[Mapping[str, Any]]) -> dict[str, Estimate]:
    """Claim 9, of pools of several sizes."""
    found: Replicates = {}
    slopes = [slope(np.log(run["clusters"]), np.log(run["seconds"])) for run in runs]
    products = [slope(np.log(run["clusters"]), np.log(run["products"])) for run in runs]
    ratios = [run["full"] / run["seconds"][0] / run["clusters"][0] for run in runs]
    for key, values in (("slope", slopes), ("products", products), ("full", ratios)):
        found[f"speed/{key}"] = resampled_mean(values, RESAMPLES, "speed", key)
    return {key: interval(values, len(runs), "sizes of the pool") for key, values in found.items()}


def check(part: Mapping[str, Any], resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """Of what `planted` found: ρ of each model, and what the relational one gains."""
    test = _Test(part, resamples, "check")
    found = {f"check/{name}": test.rho(name, resampled_spearman) for name in part["predicted"]}
    found["check/gain"] = found["check/relational"] - found["check/individual"]
    return {key: interval(values, len(test.increments), "test trajectories") for key, values in found.items()}


class _Test:
    """Predictions beside increments of one test set, resampled by trajectory."""

    def __init__(self, part: Mapping[str, Any], resamples: int, name: str) -> None:
        self.increments = _numbers(part["increments"])
        self.predicted = {model: _numbers(values) for model, values in part["predicted"].items()}
        self.times = multiplicities(len(self.increments), resamples, name, "trajectories")

    def rho(self, model: str, how: Resampled, where: str | None = None) -> np.ndarray:
        """where: another model, and nothing counts that it does not predict."""
        predicted = self.predicted[model]
        if where is not None:
            predicted = np.where(np.isfinite(self.predicted[where]), predicted, np.nan)
        return how(predicted, self.increments, self.times)

    def carry(self) -> np.ndarray:
        return resampled_spearman(self.increments[:, :-1], self.increments[:, 1:], self.times)


def _mixed(tests: Mapping[str, Any], standardised: bool = False) -> dict[str, Any]:
    """Both policies' test sets as one."""

    def joined(parts: list[Any]) -> np.ndarray:
        values = [_numbers(part) for part in parts]
        if standardised:
            values = [(v - np.nanmean(v)) / (np.nanstd(v) or 1.0) for v in values]
        return np.concatenate(values)

    names = tests["bootstrap"]["predicted"]
    return {
        "increments": joined([part["increments"] for part in tests.values()]),
        "predicted": {name: joined([part["predicted"][name] for part in tests.values()]) for name in names},
    }


def _numbers(values: Any) -> np.ndarray:
    return np.array(values, np.float64)


def _mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.array([np.mean(values)])
