import errno
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.compute.base import INLINE, Compute, Requests
from dagster_datamask.compute.local import Processes
from dagster_datamask.failures import is_transient
from dagster_datamask.selection import certified
from dagster_datamask.selection import corpus as module
from dagster_datamask.selection.budgets import Budget
from dagster_datamask.selection.certified import CertifiedOptions
from dagster_datamask.selection.corpus import (
    Block,
    Corpus,
    CorpusSelection,
    ScoreTerm,
    Sight,
    _Scratch,
    certify_corpus,
    pays,
    solve_corpus,
    zeros_on_disk,
)
from dagster_datamask.selection.objectives import BadInput, Given, QualityDiversity, Score
from dagster_datamask.selection.solve import solve

from .oracles import ids_of, vectors

CONSTANTS = (0.0, 15.0)


class Documents:
    """Documents that can be cut into shards in any way."""

    def __init__(self, n: int, d: int, shift: float, seed: int = 0, dtype: type = np.float16) -> None:
        rng = np.random.default_rng(seed)
        self.ids = ids_of(n)
        self.z = vectors(rng, n, d, shift).astype(dtype)
        self.quality = rng.uniform(0, 15, n)
        self.costs = rng.integers(1, 900, n)
        self.groups = rng.integers(0, 3, n)
        self.influence = rng.normal(0, 0.3, n)

    def corpus(
        self,
        folder: Path,
        lam: float,
        shards: list[np.ndarray],
        *,
        costs: bool = False,
        groups: bool = False,
        scores: dict[str, ScoreTerm] | None = None,
    ) -> Corpus:
        corpus = Corpus(folder, lam=lam, scale="minmax", constants=CONSTANTS, scores=scores)
        for k, rows in enumerate(shards):
            corpus.add(f"shard-{k}", lambda rows=rows: self.blocks(rows, costs, groups, bool(scores)))
        return corpus

    def blocks(self, rows: np.ndarray, costs: bool, groups: bool, scores: bool = False) -> list[Block]:
        return [
            Block(
                [self.ids[i] for i in some],
                self.quality[some],
                self.z[some],
                self.costs[some] if costs else None,
                self.groups[some] if groups else None,
                {"influence": self.influence[some]} if scores else {},
            )
            for some in np.array_split(rows, 3)
        ]


def held(corpus: Corpus, shards: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """(rows in the mask, every row's score)."""
    n = sum(rows.size for rows in shards)
    mask, scores = np.zeros(n, bool), np.zeros(n)
    for k, rows in enumerate(shards):
        mask[rows], scores[rows] = corpus.selected(f"shard-{k}")
    return np.flatnonzero(mask).tolist(), scores


@pytest.mark.parametrize(("lam", "shift"), [(0.0, 0.05), (0.1, 1.0), (1.0, 0.05)])
@pytest.mark.parametrize("kind", ["documents", "quotas", "tokens", "both"])
def test_shards_give_the_mask_of_the_solver_in_memory_bit_for_bit(
    tmp_path: Path, lam: float, shift: float, kind: str
) -> None:
    documents = Documents(700, 24, shift)
    costs, groups = kind in ("tokens", "both"), kind in ("quotas", "both")
    available = Budget(
        (0, 0, 0) if groups else (0,), documents.costs if costs else None, documents.groups if groups else None
    )
    budget = Budget(tuple(a // 10 for a in available.available(700)), available.costs, available.groups)
    f = QualityDiversity(documents.z, documents.quality, lam, "minmax", CONSTANTS)
    expected = solve(f, budget, solver="certified", ids=documents.ids)
    rng = np.random.default_rng(1)
    for name, shards in {
        "one": [np.arange(700)],
        "many, shuffled, one empty": [*np.array_split(rng.permutation(700), 6), np.zeros(0, int)],
    }.items():
        corpus = documents.corpus(tmp_path / name, lam, shards, costs=costs, groups=groups)
        found = solve_corpus(corpus, budget.amounts)
        rows, scores = held(corpus, shards)
        assert rows == expected.indices.tolist()
        assert scores.tobytes() == expected.scores.tobytes()
        assert found.evaluation.value == expected.value
        assert found.passes == expected.passes
        assert found.trajectory == expected.trajectory
        ours, theirs = found.certificate.as_dict(), expected.certificate.as_dict()
        assert ours == theirs


@pytest.mark.parametrize(("lam", "weight"), [(0.0, 0.3), (0.5, 0.2), (1.0, -0.4)])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_further_score_weighs_in_shards_as_it_does_in_memory(
    tmp_path: Path, lam: float, weight: float, tokens: bool
) -> None:
    documents = Documents(300, 16, 0.3)
    constants = (-0.6, 0.9)
    costs = documents.costs if tokens else None
    budget = Budget((int(Budget((0,), costs).available(300)[0] / 10),), costs)
    f = QualityDiversity(
        documents.z,
        documents.quality if lam else None,
        lam,
        "minmax",
        CONSTANTS,
        scores={"influence": Score(documents.influence, weight, constants)},
    )
    expected = solve(f, budget, solver="certified", ids=documents.ids)
    plain = solve(replace(f, scores={}), budget, solver="certified", ids=documents.ids)
    shards = np.array_split(np.random.default_rng(1).permutation(300), 4)
    terms = {"influence": ScoreTerm(weight, constants)}
    corpus = documents.corpus(tmp_path, lam, shards, costs=tokens, scores=terms)
    found = solve_corpus(corpus, budget.amounts)
    rows, scores = held(corpus, shards)
    assert rows == expected.indices.tolist() != plain.indices.tolist()
    assert scores.tobytes() == expected.scores.tobytes()
    ours, theirs = found.certificate.as_dict(), expected.certificate.as_dict()
    assert ours == theirs
    assert ours["feasible_set"]["scores"] == {"influence": weight} and ours["gap"] >= 0
    weights = documents.costs[rows] if tokens else np.ones(len(rows))
    mean = np.average((documents.influence[rows] + 0.6) / 1.5, weights=weights)
    assert found.evaluation.scores == {"influence": pytest.approx(mean)}
    diversity, quality = found.evaluation.diversity, found.evaluation.quality if lam else 0.0
    assert found.evaluation.value == pytest.approx(lam * quality + (1 - lam) * diversity + weight * mean)


def test_what_is_given_brings_its_mean_of_a_further_score(tmp_path: Path) -> None:
    """The union of what is given and the mask, evaluated as one mask of a pool that holds both."""
    documents = Documents(60, 8, 0.3)
    terms = {"influence": ScoreTerm(0.7, (-1.0, 1.0))}
    first, rest = np.arange(20), np.arange(20, 60)
    scaled = (documents.influence[first] + 1.0) / 2.0
    unit = documents.z[first].astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    known = Given(20, unit.mean(axis=0), float((documents.quality[first] / 15).mean()), {"influence": scaled.mean()})
    corpus = documents.corpus(tmp_path / "rest", 0.5, [rest], scores=terms)
    found = solve_corpus(corpus, (5,), given=known)
    rows = rest[corpus.selected("shard-0")[0]]
    union = documents.corpus(tmp_path / "all", 0.5, [np.arange(60)], scores=terms)
    union.mark("shard-0", np.isin(np.arange(60), [*first, *rows]))
    whole, _ = certify_corpus(union, union.passes((25,)))
    assert found.evaluation.value == pytest.approx(whole.value, abs=1e-12)
    assert found.evaluation.scores == pytest.approx(whole.scores)
    assert found.certificate.gap is not None and found.certificate.gap >= 0


def test_a_further_score_that_is_missing_or_not_finite_is_named(tmp_path: Path) -> None:
    documents = Documents(6, 4, 0.3)
    terms = {"influence": ScoreTerm(1.0, (0.0, 1.0))}
    corpus = Corpus(tmp_path, lam=0.5, scale="minmax", constants=CONSTANTS, scores=terms)
    with pytest.raises(ValueError, match=r"shard a: scores \[\], and the objective weighs \['influence'\]"):
        corpus.add("a", lambda: documents.blocks(np.arange(6), False, False))
    documents.influence[4] = np.nan
    with pytest.raises(BadInput, match=r"shard b: 1 document: 'doc-4'.*the score 'influence' is not finite"):
        corpus.add("b", lambda: documents.blocks(np.arange(6), False, False, True))
    with pytest.raises(ValueError, match="'minmax' needs the constants"):
        Corpus(tmp_path, lam=0.5, scale="minmax", constants=CONSTANTS, scores={"influence": ScoreTerm(1.0)})


@given(n=st.integers(0, 12), data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_every_size_and_every_sharding_of_a_few_documents(
    n: int, data: st.DataObject, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = Documents(n, 3, 0.0, seed, np.float32)
    size = data.draw(st.integers(0, n))
    edges = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    shards = np.split(np.arange(n), edges)
    corpus = documents.corpus(tmp_path_factory.mktemp("corpus"), 0.3, shards)
    found = solve_corpus(corpus, [size])
    rows, _ = held(corpus, shards)
    f = QualityDiversity(documents.z.reshape(n, 3), documents.quality, 0.3, "minmax", CONSTANTS)
    expected = solve(f, size, solver="certified", ids=documents.ids)
    assert rows == expected.indices.tolist()
    assert found.evaluation.value == expected.value
    assert found.certificate.gap == expected.certificate.gap


def test_what_is_given_is_taken_into_account_as_in_memory(tmp_path: Path) -> None:
    documents = Documents(400, 16, 0.4)
    first = np.arange(150)
    kept = first[:30]
    unit = documents.z[kept].astype(float)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    given_ = Given(30, unit.mean(axis=0), float(documents.quality[kept].mean() / 15))
    shards = np.array_split(np.arange(150, 400), 3)
    corpus = documents.corpus(tmp_path, 0.2, shards)
    found = solve_corpus(corpus, [25], given=given_)
    f = QualityDiversity(documents.z[150:], documents.quality[150:], 0.2, "minmax", CONSTANTS, given=given_)
    expected = solve(f, 25, solver="certified", ids=documents.ids[150:])
    mask = np.concatenate([corpus.selected(f"shard-{k}")[0] for k in range(3)])
    assert np.flatnonzero(mask).tolist() == expected.indices.tolist()
    assert found.evaluation.value == expected.value
    # the union's value, from its definition
    union = np.concatenate([unit, documents.z[150:][mask].astype(float)])
    union /= np.linalg.norm(union, axis=1, keepdims=True)
    quality = np.concatenate([documents.quality[kept], documents.quality[150:][mask]]).mean() / 15
    assert found.evaluation.value == pytest.approx(0.2 * quality - 0.8 * np.sum(union.mean(axis=0) ** 2), abs=1e-12)
    assert found.certificate.feasible_set["given"] == 30


def test_a_mask_from_elsewhere_is_certified_over_all_shards(tmp_path: Path) -> None:
    documents = Documents(300, 12, 0.5)
    f = QualityDiversity(documents.z, documents.quality, 0.3, "minmax", CONSTANTS)
    drawn = solve(f, 40, solver="random", ids=documents.ids)
    shards = np.array_split(np.arange(300), 4)
    corpus = documents.corpus(tmp_path, 0.3, shards)
    mask = np.zeros(300, bool)
    mask[drawn.indices] = True
    for k, rows in enumerate(shards):
        corpus.mark(f"shard-{k}", mask[rows])
    evaluation, certificate = certify_corpus(corpus, corpus.passes([40]))
    assert evaluation.value == drawn.value
    assert certificate.baseline == drawn.certificate.baseline
    assert certificate.upper_bound >= drawn.certificate.upper_bound - 1e-9


def test_a_whole_shard_is_not_read_again_and_a_half_one_is(tmp_path: Path) -> None:
    documents = Documents(60, 4, 0.5)
    shards = np.array_split(np.arange(60), 2)
    documents.corpus(tmp_path, 0.3, shards)

    def never() -> list[Block]:
        raise AssertionError("read again")

    corpus = Corpus(tmp_path, lam=0.3, scale="minmax", constants=CONSTANTS)
    corpus.add("shard-0", never)
    # as a kill leaves it: arrays and no record
    (tmp_path / "shard-1" / "shard.json").unlink()
    (tmp_path / "shard-1" / "vectors.bin").write_bytes(b"half")
    corpus.add("shard-1", lambda: documents.blocks(shards[1], False, False))
    found = solve_corpus(corpus, [10])
    clean = solve_corpus(documents.corpus(tmp_path / "clean", 0.3, shards), [10])
    assert found.evaluation.value == clean.evaluation.value
    assert (corpus.checksum, corpus.n) == (documents.corpus(tmp_path / "again", 0.3, shards[::-1]).checksum, 60)
    # and a second solve over the same scratch starts from nothing
    assert solve_corpus(corpus, [10]).certificate.as_dict() == found.certificate.as_dict()


def test_few_passes_on_anisotropic_vectors(tmp_path: Path) -> None:
    documents = Documents(6000, 32, 1.5, dtype=np.float32)
    shards = np.array_split(np.arange(6000), 5)
    found = solve_corpus(documents.corpus(tmp_path, 0.5, shards), [600], options=CertifiedOptions(gap=1e-6))
    assert found.certificate.gap <= 1e-6
    assert len(found.history) <= 30
    assert all(len(entry["point"]) == 32 and len(entry["score"]) == 1 for entry in found.history)


class Place:
    """Workers that are this process, or another place's, with what a test does to the rounds that they are given."""

    def __init__(self, place: Compute = INLINE, given: Callable[[int, Sequence[Any]], Sequence[Any]] | None = None):
        self.place, self.given, self.rounds = place, given, 0
        self.workers = 3
        self.worker: Callable[[Any], Any] = lambda worker: worker

    @contextmanager
    def session(self, worker: Any, *, requests: Requests) -> Iterator["Place"]:
        self.requests = requests
        with self.place.session(self.worker(worker)) as self.own:
            yield self

    def each(self, items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        self.rounds += 1
        yield from self.own.each(items if self.given is None else self.given(self.rounds, items))


def all_of(corpus: Corpus, found: CorpusSelection) -> list[Any]:
    """All that a solve finds, to the last bit."""
    return [
        *(tuple(array.tobytes() for array in corpus.selected(name)) for name in sorted(corpus.names)),
        found.certificate.as_dict(),
        found.evaluation.value,
        (found.passes, found.certifying),
        found.trajectory,
        found.history,
    ]


@pytest.mark.parametrize("kind", ["documents", "tokens and quotas", "enumerated"])
def test_workers_leave_no_trace_even_where_each_part_is_worked_on_twice(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice is what a lost worker comes to that had done its work, and told nobody."""
    n = 12 if kind == "enumerated" else 300
    documents = Documents(n, 24, 0.3)
    many = kind == "tokens and quotas"
    shards = np.array_split(np.random.default_rng(1).permutation(n), 5)
    corpus = documents.corpus(tmp_path, 0.1, shards, costs=many, groups=many)
    available = Budget((0, 0, 0), documents.costs, documents.groups).available(n) if many else [n]
    # few passes of the first kind, so that the search gets to all the others
    monkeypatch.setattr(certified, "_FRANK_WOLFE", 3)
    amounts, options = [a // 10 for a in available], CertifiedOptions(gap=1e-9, passes=6, moves=20)
    expected = all_of(corpus, solve_corpus(corpus, amounts, options=options))
    monkeypatch.setattr(module, "_SPREAD", 0)
    place = Place(given=lambda round_, items: [*reversed(items), *items])
    found = solve_corpus(corpus, amounts, options=options, compute=place, requests=Requests(cpus=2.0))
    assert all_of(corpus, found) == expected
    notes = {entry["note"] for entry in found.trajectory}
    assert notes >= {"documents": {"screened", "exchanged"}, "enumerated": {"enumerated"}}.get(kind, {"filled"})
    assert place.rounds > 5 and place.requests.cpus == 2.0


def test_processes_find_the_same_and_one_that_is_killed_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents(300, 24, 0.2)
    corpus = documents.corpus(tmp_path, 0.05, np.array_split(np.arange(300), 4))
    options = CertifiedOptions(passes=6, moves=20)
    expected = all_of(corpus, solve_corpus(corpus, [30], options=options))
    monkeypatch.setattr(module, "_SPREAD", 0)
    died, lost = tmp_path / "died", []

    def deadly(round_: int, items: Sequence[Any]) -> Sequence[Any]:
        run, mark = items[0].work, died / str(round_)

        def work(part: Any, *given: Any) -> Any:
            # the work is done, and all it wrote is there: but nobody is told
            found = pickle.loads(run)(part, *given)
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return [replace(items[0], work=cloudpickle.dumps(work)), *items[1:]] if round_ == 9 else items

    died.mkdir()
    with Processes(2, threads=1, log=lost.append) as processes:
        found = solve_corpus(corpus, [30], options=options, compute=Place(processes, deadly))
        assert all_of(corpus, found) == expected
    assert len(lost) == 1 and "the solver's parts 0 to 0" in lost[0]
    assert not list(tmp_path.glob("*.token"))


@pytest.mark.slow
@pytest.mark.slow
def test_two_nodes_of_a_ray_cluster_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from ray.cluster_utils import Cluster

    from dagster_datamask.compute.cluster import RayCluster

    documents = Documents(300, 24, 0.2)
    corpus = documents.corpus(tmp_path, 0.05, np.array_split(np.arange(300), 5))
    options = CertifiedOptions(passes=6, moves=20)
    expected = all_of(corpus, solve_corpus(corpus, [30], options=options))
    monkeypatch.setattr(module, "_SPREAD", 0)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"include_dashboard": False, **node})
    try:
        cluster.add_node(**node)
        place, rounds = RayCluster(cluster.address, shared=tmp_path), []
        try:
            spread = Place(place, lambda round_, items: rounds.append(len(items)) or items)
            assert place.workers == 2
            assert all_of(corpus, solve_corpus(corpus, [30], options=options, compute=spread)) == expected
            assert rounds and set(rounds) == {5}
        finally:
            place.close()
    finally:
        cluster.shutdown()


def test_where_workers_do_not_see_the_scratch_the_solver_runs_here_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents(60, 8, 0.3)
    corpus = documents.corpus(tmp_path, 0.3, np.array_split(np.arange(60), 3))
    expected = all_of(corpus, solve_corpus(corpus, [6]))
    monkeypatch.setattr(module, "_SPREAD", 0)
    monkeypatch.setattr(module, "_SECONDS_TO_SEE", 0.0)
    place, told = Place(), []
    elsewhere = Sight(str(tmp_path), "of another folder", "driver")
    place.worker = lambda worker: replace(worker, sight=elsewhere)
    assert all_of(corpus, solve_corpus(corpus, [6], compute=place, log=told.append)) == expected
    assert len(told) == 1 and "the solver runs in this process" in told[0] and "scratch folder of driver" in told[0]


def test_parts_that_end_every_worker_are_left_to_this_process_which_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents(60, 8, 0.3)
    corpus = documents.corpus(tmp_path, 0.3, np.array_split(np.arange(60), 3))
    expected = all_of(corpus, solve_corpus(corpus, [6]))
    monkeypatch.setattr(module, "_SPREAD", 0)
    told: list[str] = []

    def deadly(round_: int, items: Sequence[Any]) -> Sequence[Any]:
        def work(part: Any, *given: Any) -> Any:
            part.member[:] = True
            os.kill(os.getpid(), signal.SIGKILL)

        return [replace(items[0], work=cloudpickle.dumps(work)), *items[1:]] if round_ == 3 else items

    with Processes(2, threads=1) as processes:
        found = solve_corpus(corpus, [6], compute=Place(processes, deadly), log=told.append)
    assert all_of(corpus, found) == expected
    (line,) = told
    assert line.startswith("the solver runs in this process: ") and "the solver's parts 0 to 0 (SIGKILL)" in line


def test_a_full_disk_is_an_error_before_anything_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = _Scratch(tmp_path, 4, "r+")

    def full(handle: int, at: int, size: int) -> None:
        # some of it was there
        os.ftruncate(handle, 8)
        raise OSError(number, os.strerror(number))

    number = errno.ENOSPC
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"best\.bin") as caught:
            scratch("best", np.float64)
        assert caught.value.errno == errno.ENOSPC and not is_transient(caught.value)
        with pytest.raises(OSError, match=r"ranks\.bin"):
            zeros_on_disk(tmp_path / "ranks.bin", np.int64, 3)
        # a file system that cannot say
        number = errno.EOPNOTSUPP
        assert scratch("order", np.float64).tolist() == [0.0] * 4
    # once there is room, what was left of the first try is no harm; and room is kept
    assert scratch("best", np.float64).tolist() == [0.0] * 4
    assert (tmp_path / "best.bin").stat().st_blocks > 0
    assert [zeros_on_disk(tmp_path / "ranks.bin", np.int64, rows).tolist() for rows in (3, 0)] == [[0, 0, 0], []]
    # what was stored is not made up for where a part of it is missing
    (tmp_path / "ties.bin").write_bytes(b"8 bytes.")
    with pytest.raises(ValueError, match="mmap length"):
        _Scratch(tmp_path, 4, "r")("ties", np.uint64)


def test_other_processes_are_for_large_corpora_of_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents(40, 8, 0.3)
    several = documents.corpus(tmp_path / "several", 0.3, np.array_split(np.arange(40), 2))
    one = documents.corpus(tmp_path / "one", 0.3, [np.arange(40), np.zeros(0, int)])
    assert not pays(several, Place())
    monkeypatch.setattr(module, "_SPREAD", 40 * 8)
    assert pays(several, Place()) and not pays(one, Place()) and not pays(several, INLINE)
    monkeypatch.setattr(module, "_SPREAD", 40 * 8 + 1)
    assert not pays(several, Place())


def test_an_error_of_a_worker_is_that_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPREAD", 0)
    documents = Documents(60, 8, 0.3)
    grouped = documents.corpus(tmp_path, 0.3, np.array_split(np.arange(60), 3), groups=True)
    with pytest.raises(ValueError, match="is of group 2, and there are 2 quotas"):
        solve_corpus(grouped, [1, 1], compute=Place())
    assert not list(tmp_path.glob("*.token"))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 1e-30])
def test_bad_vectors_name_the_shard_and_the_documents(tmp_path: Path, value: float) -> None:
    documents = Documents(20, 3, 0.5, dtype=np.float32)
    documents.z[[3, 7]] = value
    with pytest.raises(BadInput, match=r"shard shard-0: .*'doc-3'.*embedding is zero, not finite or of no sensible"):
        documents.corpus(tmp_path, 0.3, [np.arange(20)])
    documents = Documents(20, 3, 0.5)
    documents.quality[4] = np.nan
    with pytest.raises(BadInput, match=r"shard shard-0: .*'doc-4'.*score is not finite"):
        documents.corpus(tmp_path / "scores", 0.3, [np.arange(20)])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    documents = Documents(20, 3, 0.5)
    for scale in ("per_pool", "zscore"):
        with pytest.raises(ValueError, match=f"scale '{scale}' depends on the whole pool"):
            Corpus(tmp_path, lam=0.3, scale=scale, constants=None)
    corpus = documents.corpus(tmp_path, 0.3, [np.arange(20)])
    with pytest.raises(ValueError, match="budget 21 is not between 0 and the 20 documents of the corpus"):
        solve_corpus(corpus, [21])
    with pytest.raises(ValueError, match="of another kind than those before"):
        corpus.add("other", lambda: [Block(["x"], np.ones(1), np.ones((1, 4), np.float16))])
    grouped = documents.corpus(tmp_path / "groups", 0.3, [np.arange(20)], groups=True)
    with pytest.raises(ValueError, match="is of group 2, and there are 2 quotas"):
        solve_corpus(grouped, [1, 1])


def test_columns_of_another_kind_or_length_are_refused(tmp_path: Path) -> None:
    z = np.ones((3, 2), np.float16)
    for k, (block, message) in enumerate(
        [
            (Block(["a", "b"], np.ones(3), z), "2 ids and 3 vectors"),
            (Block(["a", "b", "c"], np.ones(2), z), "3 ids and 2 scores"),
            (Block(["a", "b", "c"], np.ones(3), z, costs=np.full(3, 1.5)), "token counts must be whole numbers"),
            (Block(["a", "b", "c"], np.ones(3), z, costs=np.full(3, 2**28)), f"row 0 has {2**28} tokens"),
            (Block(["a", "b", "c"], np.ones(3), z, groups=np.zeros(3)), "groups must be whole numbers"),
        ]
    ):
        corpus = Corpus(tmp_path / str(k), lam=0.3, scale="minmax", constants=CONSTANTS)
        with pytest.raises(ValueError, match=f"shard x: {message}"):
            corpus.add("x", lambda block=block: [block])
    plain = Corpus(tmp_path / "plain", lam=0.0, scale="minmax", constants=None)
    plain.add("x", lambda: [Block(["a"], None, z[:1].astype(np.float32))])
    assert plain.dtype == "float32"
    with pytest.raises(ValueError, match="was written without scores, for λ = 0; remove it"):
        Corpus(tmp_path / "plain", lam=0.3, scale="raw", constants=None).add("x", list)
