"""What a subject of the study is, and how large everything is.

Here: sizes for a test and for the run that people read, and a subject's parts. Not here: where the parts come from
(`worlds`, `text`).
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dagster_datamask.influence.language_model import Checkpoint, LanguageModelOptions
from dagster_datamask.influence.pretraining import PretrainingOptions
from dagster_datamask.influence.reference import Reference
from dagster_datamask.influence.relational import InfluenceOptions


@dataclass(frozen=True)
class Sizes:
    """Of one subject.

    warm_up, later: training steps before the first checkpoint and from there to the second; batch, rate, go_on: of the
    training, and steps after the selection. reference, held_out: their documents. counts: random trajectories that the
    models are fitted to in turn, of which `main` is for everything but claim 4; what goes beyond is for seed 0 alone.
    bootstrap: trajectories of the bootstrap policy among `main`; plain: those with β₁ = 0; validation, test:
    trajectories, the first for a fit to `main`; extreme: K. probe, pool: documents that trajectories are drawn from,
    and to select from. choose_from, choose, pools, brute: N and n of the group selections, how many pools of N, and on
    how many brute force runs. drift: documents probed at both checkpoints. share, clusters: of the pool to select, and
    in how many clusters; draws: random selections. cost: of a probe beside one of a world.
    """

    model: LanguageModelOptions
    warm_up: int
    later: int
    batch: int
    rate: float
    go_on: int
    reference: int
    held_out: int
    counts: tuple[int, ...]
    main: int
    bootstrap: int
    plain: int
    validation: int
    test: int
    probe: int
    pool: int
    choose_from: int
    choose: int
    pools: int
    brute: int
    drift: int
    steps: int = 10
    extreme: int = 5
    features: int = 0
    hidden: int = 0
    width: int = 64
    epochs: int = 20
    share: float = 0.25
    clusters: int = 20
    draws: int = 3
    cost: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fitted(self, seed: int) -> tuple[int, ...]:
        """The numbers of trajectories that a subject of this seed has."""
        return self.counts if seed == 0 or max(self.counts) == self.main else (self.main,)

    @property
    def random_validation(self) -> int:
        """Of the validation trajectories, those that are random where `bootstrap` of `main` are not."""
        return round(self.validation * (1 - self.bootstrap / self.main))

    def planned(self, seed: int) -> int:
        """Probes and training steps of a subject."""
        trajectories = max(self.fitted(seed)) + self.validation + 2 * self.test
        trajectories += self.bootstrap + self.validation - self.random_validation
        trajectories += self.plain + self.validation + self.test
        brute = self.brute * sum(self.choose_from - k for k in range(self.choose))
        replayed = self.choose * (self.pools * (4 + 3) + self.brute)
        # five ways to select, random draws, and in a world the best there is
        training = self.warm_up + self.later + (5 + self.draws + bool(self.features)) * self.go_on
        return trajectories * self.steps + brute + replayed + 3 * self.drift + training

    def options(self, seed: int, **values: Any) -> InfluenceOptions:
        return InfluenceOptions(
            hidden=self.hidden, width=self.width, epochs=self.epochs, held_out=HELD_OUT, seed=seed, **values
        )

    def training(self, seed: int) -> PretrainingOptions:
        """One run: warm-up, on to the later checkpoint or on over what was selected, at one rate after its start."""
        steps = self.warm_up + max(self.later, self.go_on)
        return PretrainingOptions(steps, self.batch, self.rate, warmup=self.warm_up // 10, decay=0.0, seed=seed)


# the share of the documents for probing that decides the epoch
HELD_OUT = 0.15

WORLD = Sizes(
    model=LanguageModelOptions(layers=2, width=64, heads=2, context=64, vocabulary=32),
    warm_up=400,
    later=200,
    batch=16,
    rate=3e-3,
    go_on=50,
    reference=16,
    held_out=128,
    counts=(25, 50, 100, 200),
    main=100,
    bootstrap=40,
    plain=60,
    validation=20,
    test=60,
    probe=2000,
    pool=2000,
    choose_from=128,
    choose=16,
    pools=4,
    brute=1,
    drift=100,
    features=1024,
    hidden=128,
)
TEXT = Sizes(
    model=LanguageModelOptions(layers=6, width=128, heads=4, context=128, vocabulary=2048),
    warm_up=200,
    later=40,
    batch=8,
    rate=2e-3,
    go_on=24,
    reference=12,
    held_out=60,
    counts=(15, 30, 60),
    main=60,
    bootstrap=24,
    plain=30,
    validation=12,
    test=30,
    probe=2500,
    pool=3000,
    choose_from=48,
    choose=6,
    pools=3,
    brute=1,
    drift=60,
    draws=1,
    cost=6.0,
)
# tokens of a reference text: its loss is most of what a probe costs
REFERENCE_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Documents:
    """ids; tokens int64[n, length]; features float32[n, d], one vector a document of an encoder that stays as it is."""

    ids: list[str]
    tokens: np.ndarray
    features: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, rows: np.ndarray | slice) -> "Documents":
        places = np.arange(len(self.ids))[rows]
        return Documents([self.ids[i] for i in places.tolist()], self.tokens[places], self.features[places])


@dataclass(frozen=True, eq=False)
class Subject:
    """A language model at a checkpoint and at a later one of the same training, its references, and documents that have
    none in common: `probe` for trajectories to learn from, `test` for those to judge by, `pool` to select from. best:
    rows of the pool that are known to help most, where that is known. encoder: what the features are of."""

    name: str
    place: str
    seed: int
    sizes: Sizes
    checkpoint: Checkpoint
    later: Checkpoint
    reference: Reference
    held_out: Reference
    probe: Documents
    test: Documents
    pool: Documents
    encoder: str
    best: np.ndarray | None = None


# all of it in seconds
SMOKE_WORLD = Sizes(
    model=LanguageModelOptions(layers=1, width=16, heads=2, context=24, vocabulary=32),
    warm_up=20,
    later=5,
    batch=8,
    rate=3e-3,
    go_on=4,
    reference=6,
    held_out=10,
    counts=(6, 9, 12, 16),
    main=12,
    bootstrap=5,
    plain=8,
    validation=6,
    test=8,
    probe=120,
    pool=100,
    choose_from=16,
    choose=4,
    pools=4,
    brute=1,
    drift=12,
    steps=4,
    extreme=2,
    features=64,
    hidden=8,
    width=8,
    epochs=2,
    clusters=4,
)
SMOKE_TEXT = replace(
    SMOKE_WORLD,
    model=LanguageModelOptions(layers=1, width=16, heads=2, context=24, vocabulary=300),
    counts=(4, 6, 8, 12),
    brute=3,
    features=0,
    hidden=0,
    draws=1,
)
