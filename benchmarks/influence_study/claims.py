"""The claims, in advance: what is said, how it is measured, when it counts as reproduced, and against which control.

Here: no result and no computation but the verdict. A claim is reproduced where the 95 % interval of each of its tests
lies where the test says; else it is not, and a result that cannot be told from nothing is none. It is not decidable
here where it was not measured, or on fewer than `LEAST` runs. A control decides nothing: it says what a result means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["reproduced", "not reproduced", "not decidable here"]

# independent runs below which an interval over them is none
LEAST = 3


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, over `units` of what was resampled."""

    value: float
    low: float
    high: float
    units: int
    over: str


@dataclass(frozen=True)
class Quantity:
    """A quantity that is estimated, and where its interval has to lie: between `least` and `most`, both left out.

    reaches: it is enough that the interval reaches into that range. Without bounds the quantity is only told.
    """

    key: str
    what: str
    least: float | None = None
    most: float | None = None
    reaches: bool = False

    @property
    def rule(self) -> str:
        bounds = [f"> {self.least:g}"] if self.least is not None else []
        bounds += [f"< {self.most:g}"] if self.most is not None else []
        if not bounds:
            return "told"
        return f"{'reaches' if self.reaches else 'whole interval'} {' and '.join(bounds)}"

    def passes(self, found: Estimate) -> bool:
        low, high = (found.high, found.low) if self.reaches else (found.low, found.high)
        return (self.least is None or low > self.least) and (self.most is None or high < self.most)


@dataclass(frozen=True)
class Claim:
    """number: of the table that was registered; passes: the tests in words; tests: all have to pass; controls: told
    beside."""

    number: int
    claim: str
    measure: str
    passes: str
    control: str
    tests: tuple[Quantity, ...]
    controls: tuple[Quantity, ...] = ()

    def verdict(self, found: Mapping[str, Estimate]) -> Verdict:
        """found: the estimates of one place by key."""
        if any(test.key not in found or found[test.key].units < LEAST for test in self.tests):
            return "not decidable here"
        return "reproduced" if all(test.passes(found[test.key]) for test in self.tests) else "not reproduced"


def above(key: str, what: str) -> Quantity:
    return Quantity(key, what, least=0.0)


def below(key: str, what: str) -> Quantity:
    return Quantity(key, what, most=0.0)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        1,
        "The relational model predicts influence better than the individual one.",
        "Difference of Spearman's ρ, relational (cosine) − individual, on fresh trajectories of documents that neither "
        "the fit nor the choice of the epoch has seen; pooled over positions, and the mean of each position's own.",
        "ρ higher, pooled and within",
        "The predecessors of another trajectory; β₁ = 0 in the probe, so that no step carries earlier gradients on; no "
        "document in common between training, validation and test.",
        (
            above("relational/pooled", "relational − individual, pooled"),
            above("relational/within", "relational − individual, within positions"),
        ),
        (
            Quantity("individual/pooled", "individual alone, pooled"),
            Quantity("cosine/pooled", "relational alone, pooled"),
            Quantity("shuffled/pooled", "relational − itself with others' predecessors, pooled"),
            Quantity("shuffled/within", "relational − itself with others' predecessors, within"),
            Quantity("plain/relational/pooled", "β₁ = 0: relational − individual, pooled"),
            Quantity("plain/relational/within", "β₁ = 0: relational − individual, within"),
            Quantity("carry/momentum", "successive increments' correlation, β₁ = 0.9"),
            Quantity("carry/plain", "successive increments' correlation, β₁ = 0"),
            Quantity("planted/pooled", "relational − individual where Eq. 13 was planted"),
        ),
    ),
    Claim(
        2,
        "Cosine is a better relation than the dot product.",
        "As claim 1, cosine − dot, both with a bracket clamped at 0 (a dot product has no bound).",
        "ρ higher, pooled and within",
        "The same layers, parameters, epochs and trajectories for both.",
        (
            above("similarity/pooled", "cosine − dot, pooled"),
            above("similarity/within", "cosine − dot, within positions"),
        ),
        (
            Quantity("dot/pooled", "dot − individual, pooled"),
            Quantity("clamped/pooled", "cosine clamped − cosine with β ≥ 1, pooled"),
        ),
    ),
    Claim(
        3,
        "Bootstrap trajectories make a better influence model.",
        "Relational model on random and bootstrap trajectories − one on as many random ones; pooled ρ on a test set of "
        "both policies, half and half.",
        "ρ higher on the mixed test",
        "Each policy z-scored by itself; each policy's test set alone; the individual model.",
        (above("bootstrap/mixed", "with bootstrap − random only, mixed test"),),
        (
            Quantity("bootstrap/per policy", "the same, each policy z-scored by itself"),
            Quantity("bootstrap/random", "the same on random test trajectories"),
            Quantity("bootstrap/bootstrap", "the same on bootstrap test trajectories"),
            Quantity("bootstrap/individual", "the same for the individual model, mixed test"),
        ),
    ),
    Claim(
        4,
        "More trajectories help, and then less and less.",
        "Pooled ρ of the relational model after each number of trajectories, on one test set.",
        "the most better than the fewest, and no increase that certainly harms",
        "Three seeds; the individual model.",
        (
            above("trajectories/all", "the most − the fewest"),
            Quantity("trajectories/1", "first increase", least=0.0, reaches=True),
            Quantity("trajectories/2", "second increase", least=0.0, reaches=True),
            Quantity("trajectories/3", "third increase", least=0.0, reaches=True),
        ),
        (
            Quantity("trajectories/bend", "last increase − first increase"),
            Quantity("trajectories/individual", "the individual model, the most − the fewest"),
        ),
    ),
    Claim(
        5,
        "Individual and group selection part as more is selected.",
        "Share of the n documents of lowest single influence that the greedy choice by true influence takes too, at "
        "n = 2, 4, 8, 16 of N (at n = 1 they are one document); its slope per doubling of n.",
        "overlap falls with n",
        "What a random choice would share, n/N.",
        (below("overlap/slope", "overlap per doubling of n"),),
        (
            Quantity("overlap/last", "overlap at the largest n"),
            Quantity("overlap/last beside random", "overlap at the largest n − n/N"),
        ),
    ),
    Claim(
        6,
        "The relational greedy comes closer to the brute-force choice.",
        "Sum of the true increments while the documents chosen are replayed through the language model, n of N "
        "documents that no influence model has seen; lower is better.",
        "sum lower than individual's and random's",
        "The individual model's n lowest; a random choice; β₁ = 0.",
        (
            below("chosen/individual", "relational − individual"),
            below("chosen/random", "relational − random"),
        ),
        (
            Quantity("chosen/individual beside random", "individual − random"),
            Quantity("chosen/one relation", "relational − itself with α = β = 1"),
            Quantity("chosen/plain/individual", "β₁ = 0: relational − individual"),
            Quantity("chosen/plain/random", "β₁ = 0: relational − random"),
        ),
    ),
    Claim(
        7,
        "Training on the group's selection lowers the reference loss more.",
        "Loss on a held-out reference after training goes on for the same steps on 25 % of a pool that nobody has "
        "seen: relational greedy in clusters of influence space − individual top-k.",
        "loss lower than individual's",
        "Individual top-k in the same clusters and budgets; no clusters; MATES's Gumbel top-k; random.",
        (below("continued/individual", "group − individual"),),
        (
            Quantity("continued/same clusters", "group − individual in the same clusters"),
            Quantity("continued/no clusters", "relational greedy without clusters − individual"),
            Quantity("continued/gumbel", "group − Gumbel top-k"),
            Quantity("continued/random", "group − random"),
            Quantity("continued/individual beside random", "individual − random"),
        ),
    ),
    Claim(
        8,
        "Documents of different clusters hardly relate.",
        "Mean R over pairs of different clusters, all pairs, in the learned space.",
        "mean R across clusters within ±0.1",
        "The same in the encoder's own space, and for a random partition of the same sizes.",
        (Quantity("across/learned", "mean R across clusters", least=-0.1, most=0.1),),
        (
            Quantity("inside/learned", "mean R inside clusters"),
            Quantity("across sd/learned", "standard deviation of R across"),
            Quantity("across/encoder", "encoder: mean cosine across"),
            Quantity("inside/encoder", "encoder: mean cosine inside"),
            Quantity("across/partition", "random partition: mean R across"),
            Quantity("inside/partition", "random partition: mean R inside"),
        ),
    ),
    Claim(
        9,
        "d clusters make selection about d times faster.",
        "Slope of log seconds, of the picks alone, on log d; keep 10 % of 768-dimensional vectors.",
        "slope on log d between −1.15 and −0.85",
        "The greedy without clusters, extrapolated; products counted.",
        (Quantity("speed/slope", "slope of log seconds on log d", least=-1.15, most=-0.85),),
        (
            Quantity("speed/products", "slope of log products on log d"),
            Quantity("speed/full", "seconds without clusters over seconds in the fewest clusters, × fewer"),
        ),
    ),
    Claim(
        10,
        "Influence changes with the checkpoint.",
        "Spearman's ρ of the influences of the same documents, each alone, at two checkpoints of one training.",
        "ρ below 1",
        "The same checkpoint twice.",
        (Quantity("drift/checkpoints", "ρ between two checkpoints", most=1.0),),
        (Quantity("drift/same", "ρ of one checkpoint with itself"),),
    ),
)

# no claim of the paper: what the relational greedy is held to here, where brute force can be afforded
BAR = Claim(
    0,
    "The relational greedy beats individual top-k and random where brute force can be run.",
    "Pools of documents that no influence model has seen. Every choice is replayed through the language "
    "model, and its true increments are summed; lower is better.",
    "sum lower than individual's and random's",
    "Brute force itself; the lowest true single influences.",
    (
        below("bar/individual", "relational greedy − individual model's top-k"),
        below("bar/random", "relational greedy − random"),
    ),
    (
        Quantity("bar/oracle individual", "relational greedy − n lowest true single influences"),
        Quantity("bar/brute force", "relational greedy − brute force"),
    ),
)
