import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.budgets import Budget
from dagster_datamask.selection.certified import CertifiedOptions
from dagster_datamask.selection.dvrl import DvrlOptions
from dagster_datamask.selection.objectives import BadInput, QualityDiversity, Score
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import SOLVERS, Selection, solve

from .oracles import ids_of, objective, vectors, worth

FEW = PolicyGradientOptions(steps=30, batch=0.5, group=16)
OPTIONS = {"policy_gradient": FEW, "dvrl": DvrlOptions(steps=30, batch=100, group=8, hidden=16)}
# it knows no other metric
DISF = {"conditional_gradient": {"disf": 1.0}}


def run(f: QualityDiversity, budget: int, solver: str, ids: list[str] | None = None, **more: int) -> Selection:
    n = f.embeddings.shape[0]
    f = replace(f, diversity=DISF.get(solver, f.diversity))
    return solve(f, budget, solver=solver, ids=ids or ids_of(n), options=OPTIONS.get(solver), **more)


def check(found: Selection, n: int, budget: int) -> None:
    assert found.indices.dtype == np.int64
    assert found.indices.size == budget
    assert np.unique(found.indices).size == budget
    assert found.scores.shape == found.rank.shape == (n,)
    assert sorted(found.rank.tolist()) == list(range(1, n + 1))
    assert (np.diff(found.scores[np.argsort(found.rank)]) <= 0).all()
    if found.certificate.gap is not None:
        assert found.certificate.gap == found.certificate.upper_bound - found.value >= 0
    else:
        assert found.solver == "conditional_gradient"
        assert "no known bound" in str(found.certificate.reason)
    assert found.certificate.feasible_set["budget"] == budget
    text = json.dumps(found.summary(), allow_nan=False)
    assert json.loads(text)["kept"] == budget


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("n", [0, 1, 2, 5])
@pytest.mark.parametrize("d", [1, 3])
def test_every_size_is_defined_for_every_solver(solver: str, n: int, d: int) -> None:
    f = (
        objective(np.random.default_rng(n), n, d, 0.4)
        if n
        else QualityDiversity(np.zeros((0, d)), np.zeros(0), 0.4, "per_pool")
    )
    for budget in range(n + 1):
        check(run(f, budget, solver), n, budget)
    with pytest.raises(ValueError, match=f"budget {n + 1} is not between 0 and the {n} documents"):
        run(f, n + 1, solver)
    with pytest.raises(ValueError, match="budget -1 is not between 0"):
        run(f, -1, solver)


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("scale", ["per_pool", "raw"])
def test_identical_vectors_and_constant_quality(solver: str, scale: str) -> None:
    f = QualityDiversity(np.full((9, 2), 0.3, np.float16), np.full(9, 2.0), 0.5, scale)
    check(run(f, 4, solver), 9, 4)


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_240_asked_are_240_distinct(solver: str) -> None:
    rng = np.random.default_rng(0)
    # half of the vectors and most scores repeat
    z = np.repeat(vectors(rng, 500, 8), 2, axis=0)
    f = QualityDiversity(z, rng.integers(0, 3, 1000).astype(float), 0.3, "per_pool")
    check(run(f, 240, solver), 1000, 240)


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_permuted_pool_selects_the_same_ids(solver: str) -> None:
    rng = np.random.default_rng(3)
    z = np.repeat(vectors(rng, 150, 6), 2, axis=0).astype(np.float16)
    q, ids = rng.integers(0, 4, 300).astype(float), ids_of(300)
    shuffle = rng.permutation(300)
    one = run(QualityDiversity(z, q, 0.3, "per_pool"), 60, solver, ids)
    names = [ids[i] for i in shuffle]
    two = run(QualityDiversity(z[shuffle], q[shuffle], 0.3, "per_pool"), 60, solver, names)
    assert {ids[i] for i in one.indices} == {names[i] for i in two.indices}
    assert one.value == two.value
    assert one.certificate.as_dict() == two.certificate.as_dict()
    assert (one.scores[shuffle] == two.scores).all()
    assert (one.rank[shuffle] == two.rank).all()


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_two_runs_are_equal_bit_for_bit(solver: str) -> None:
    f = objective(np.random.default_rng(1), 400, 12, 0.2)
    one, two = run(f, 50, solver), run(f, 50, solver)
    assert one.scores.tobytes() == two.scores.tobytes()
    assert (one.indices.tobytes(), one.value, one.trajectory) == (two.indices.tobytes(), two.value, two.trajectory)


@pytest.mark.parametrize("solver", ["policy_gradient", "certified", "semdedup"])
def test_the_number_of_cores_leaves_no_trace(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    f = QualityDiversity(rng.standard_normal((6000, 64)).astype(np.float16), rng.random(6000), 0.1, "per_pool")
    results = []
    for cores in (1, 3):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        options = PolicyGradientOptions(steps=10, batch=0.5) if solver == "policy_gradient" else None
        found = solve(f, 600, solver=solver, ids=ids_of(6000), options=options)
        results.append((found.scores.tobytes(), found.indices.tobytes(), found.certificate.as_dict(), found.trajectory))
    assert results[0] == results[1]


def test_a_large_pool_costs_little_more_than_its_float32_vectors() -> None:
    rng = np.random.default_rng(0)
    n, d = 70_000, 256
    f = QualityDiversity(rng.standard_normal((n, d), dtype=np.float32).astype(np.float16), None, 0.0)
    ids = ids_of(n)
    tracemalloc.start()
    try:
        found = solve(f, n // 10, solver="certified", ids=ids, options=CertifiedOptions(passes=6, moves=0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    check(found, n, n // 10)
    assert peak < 1.3 * n * d * 4


def test_seed_and_split_move_what_is_random_and_nothing_else() -> None:
    f = objective(np.random.default_rng(1), 60, 4, 0.2)
    distinct_scores = {"random": 4, "policy_gradient": 4, "dvrl": 4}
    for solver, distinct in [(s, distinct_scores.get(s, 1)) for s in SOLVERS if s != "semdedup"]:
        scores = {run(f, 9, solver, seed=seed, split=split).scores.tobytes() for seed in (0, 1) for split in (0, 1)}
        assert len(scores) == distinct, solver


@pytest.mark.parametrize("lam", [0.0, 0.1, 0.5, 1.0])
def test_every_mask_lies_below_the_certified_bound_and_above_nothing_better(lam: float) -> None:
    f = objective(np.random.default_rng(2), 300, 10, lam, shift=0.4)
    found = {s: run(f, 40, s) for s in SOLVERS if s != "conditional_gradient"}
    bounds = [s.certificate.upper_bound for s in found.values()]
    assert max(bounds) - min(bounds) < 1e-6
    assert found["certified"].value >= max(s.value for s in found.values()) - 1e-12
    assert found["certified"].certificate.share > 0.95
    assert abs(found["random"].certificate.share) < 0.5


def test_lambda_moves_between_diversity_and_quality() -> None:
    rng = np.random.default_rng(6)
    z, q = vectors(rng, 400, 8, 0.5), rng.uniform(0, 15, 400)
    picks = [run(QualityDiversity(z, q, lam, "per_pool"), 40, "certified") for lam in (0.0, 0.1, 0.5, 1.0)]
    quality = [pick.quality_raw for pick in picks]
    diversity = [pick.diversity for pick in picks]
    assert quality == sorted(quality)
    assert diversity == sorted(diversity, reverse=True)
    top = run(QualityDiversity(z, q, 0.5, "per_pool"), 40, "top_k")
    assert top.indices.tolist() == picks[-1].indices.tolist()


def test_lambda_zero_needs_no_quality() -> None:
    z = vectors(np.random.default_rng(0), 30, 4)
    plain = run(QualityDiversity(z, None, 0.0), 5, "certified")
    blind = run(QualityDiversity(z, np.full(30, np.nan), 0.0), 5, "certified")
    known = run(QualityDiversity(z, np.arange(30.0), 0.0), 5, "certified")
    assert plain.indices.tolist() == blind.indices.tolist() == known.indices.tolist()
    assert plain.value == known.value == known.diversity
    assert plain.quality_raw is blind.quality_raw is None
    assert known.quality_raw == known.indices.mean()


def test_random_is_a_uniform_sample() -> None:
    f = QualityDiversity(vectors(np.random.default_rng(0), 20, 2), None, 0.0)
    hits = np.zeros(20)
    for seed in range(250):
        hits[run(f, 5, "random", seed=seed).indices] += 1
    assert np.abs(hits / 250 - 0.25).max() < 0.1


def test_what_does_not_fit_is_refused() -> None:
    f = objective(np.random.default_rng(0), 5, 2, 0.5)
    with pytest.raises(ValueError, match="solver 'magic' is none of: policy_gradient, certified, greedy"):
        solve(f, 2, solver="magic", ids=ids_of(5))
    with pytest.raises(ValueError, match="'certified' takes CertifiedOptions, not PolicyGradientOptions"):
        solve(f, 2, solver="certified", ids=ids_of(5), options=FEW)
    with pytest.raises(ValueError, match="'policy_gradient' takes PolicyGradientOptions, not CertifiedOptions"):
        solve(f, 2, solver="policy_gradient", ids=ids_of(5), options=CertifiedOptions())
    for solver in ("top_k", "random"):
        with pytest.raises(ValueError, match=f"'{solver}' takes no options"):
            solve(f, 2, solver=solver, ids=ids_of(5), options=FEW)
    covering = replace(f, diversity={"facility_location": 1.0})
    for solver, message in [
        ("certified", "facility_location is not; take 'greedy'"),
        ("conditional_gradient", "knows disf, not facility_location"),
        ("dvrl", "knows pws, not facility_location"),
    ]:
        with pytest.raises(ValueError, match=message):
            solve(covering, 2, solver=solver, ids=ids_of(5))
    with pytest.raises(ValueError, match="'semdedup' takes a number of documents, without quotas"):
        solve(f, Budget((7,), np.full(5, 3)), solver="semdedup", ids=ids_of(5))
    with pytest.raises(ValueError, match="'top_k' ranks by quality"):
        solve(QualityDiversity(f.embeddings, None, 0.0), 2, solver="top_k", ids=ids_of(5))
    with pytest.raises(BadInput, match="'a'"):
        solve(f, 2, solver="random", ids=["a", "b", "a", "c", "d"])


def budgets_of(rng: np.random.Generator, n: int) -> dict[str, Budget]:
    costs, groups = rng.integers(1, 30, n), rng.integers(0, 3, n)
    quotas = Budget((0, 0, 0), None, groups).available(n)
    return {
        "quotas": Budget(tuple(q // 3 for q in quotas), None, groups),
        "tokens": Budget((int(costs.sum()) // 4,), costs),
        "both": Budget(tuple(q * 3 for q in quotas), costs, groups),
    }


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "semdedup"])
@pytest.mark.parametrize("kind", ["quotas", "tokens", "both"])
def test_every_solver_keeps_within_every_budget(solver: str, kind: str) -> None:
    rng = np.random.default_rng(4)
    f = objective(rng, 90, 5, 0.3)
    budget = budgets_of(rng, 90)[kind]
    found = run(f, budget, solver)
    costs = np.ones(90, int) if budget.costs is None else budget.costs
    groups = np.zeros(90, int) if budget.groups is None else budget.groups
    for g, amount in enumerate(budget.amounts):
        inside = found.indices[groups[found.indices] == g]
        spent = int(costs[inside].sum())
        assert spent <= amount
        # no document that was left out would still fit, or exactly the number asked for
        left = np.setdiff1d(np.flatnonzero(groups == g), inside)
        assert spent == amount if budget.costs is None else costs[left].min() > amount - spent
    assert found.tokens == (None if budget.costs is None else int(costs[found.indices].sum()))
    assert found.value == pytest.approx(
        worth(replace(f, diversity=DISF.get(solver, f.diversity)), found.indices.tolist(), budget.costs), abs=1e-9
    )
    if solver != "conditional_gradient":
        assert found.certificate.gap >= 0
        assert found.certificate.feasible_set["unit"] == budget.unit
        assert "no closed form" in str(found.certificate.reason)


@pytest.mark.parametrize("kind", ["quotas", "tokens", "both"])
def test_the_certified_mask_is_the_best_of_all_solvers_under_every_budget(kind: str) -> None:
    rng = np.random.default_rng(8)
    f = objective(rng, 400, 8, 0.1, shift=0.4)
    budget = budgets_of(rng, 400)[kind]
    found = {s: run(f, budget, s) for s in ("certified", "policy_gradient", "greedy", "top_k", "random")}
    assert found["certified"].value >= max(s.value for s in found.values()) - (0.0 if kind == "quotas" else 1e-3)
    assert found["certified"].certificate.gap < 0.2 * (found["certified"].value - found["random"].value)


def test_further_scores_pull_as_hard_as_their_weight_says() -> None:
    rng = np.random.default_rng(3)
    z, influence = vectors(rng, 300, 6, 0.3), rng.standard_normal(300)
    means = []
    for weight in (-1.0, 0.0, 0.2, 2.0):
        f = QualityDiversity(z, None, 0.0, "raw", scores={"influence": Score(influence, weight)})
        found = run(f, 30, "certified")
        means.append(influence[found.indices].mean())
        assert found.value == pytest.approx(worth(f, found.indices.tolist()), abs=1e-12)
        assert found.certificate.gap < 1e-2
    assert means == sorted(means)
    assert means[-1] > influence.mean() + 1.0


def test_a_dropped_near_duplicate_names_the_kept_one() -> None:
    rng = np.random.default_rng(0)
    z = np.repeat(vectors(rng, 40, 8), 3, axis=0) + 1e-3 * rng.standard_normal((120, 8))
    found = run(QualityDiversity(z, None, 0.0), 40, "semdedup")
    kept, unit = set(found.indices.tolist()), z / np.linalg.norm(z, axis=1, keepdims=True)
    assert found.facts["epsilon"] > 0
    for row in range(120):
        if row in kept:
            assert (found.kept[row], np.isnan(found.similarity[row])) == (-1, True)
        elif found.kept[row] >= 0:
            assert found.kept[row] in kept
            assert found.similarity[row] == pytest.approx(unit[row] @ unit[found.kept[row]], abs=1e-5)
    # every triple keeps one
    assert {row // 3 for row in kept} == set(range(40))


@pytest.mark.parametrize("solver", ["certified", "top_k", "random", "greedy", "semdedup"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_bad_vectors_stop_every_solver_at_once(solver: str, bad: float) -> None:
    z = vectors(np.random.default_rng(0), 20, 3)
    z[7] = bad
    with pytest.raises(BadInput, match=r"'doc-7' \(row 7\)"):
        run(QualityDiversity(z, np.arange(20.0), 0.5, "per_pool"), 5, solver)


@given(
    solver=st.sampled_from(list(SOLVERS)),
    metric=st.sampled_from(["pws", "facility_location", "disf", "disf_second_moment"]),
    kind=st.sampled_from(["isotropic", "opposite", "duplicates", "one vector", "half precision"]),
    level=st.booleans(),
    n=st.integers(0, 14),
    data=st.data(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_in_the_budget_is_met_exactly_or_the_reason_told(
    solver: str, metric: str, kind: str, level: bool, n: int, data: st.DataObject, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    z = vectors(rng, n, 3)
    if kind == "opposite":
        z = np.where(np.arange(n)[:, None] % 2, 1.0, -1.0) * np.abs(z)
    elif kind == "duplicates":
        z = z[rng.integers(0, max(1, n // 3), n)] if n else z
    elif kind == "one vector":
        z = np.ones((n, 3))
    elif kind == "half precision":
        z = z.astype(np.float16)
    quality = np.full(n, 2.0) if level else rng.uniform(0, 15, n)
    f = QualityDiversity(z, quality, 0.3, "per_pool", diversity={metric: 1.0})
    size = data.draw(st.integers(0, n))
    try:
        found = solve(f, size, solver=solver, ids=ids_of(n), options=OPTIONS.get(solver))
    except ValueError as error:
        # a solver that does not know the metric says so, and nothing else stops any of them
        assert metric != "pws" or solver == "conditional_gradient"
        assert metric in str(error)
        return
    assert found.indices.size == np.unique(found.indices).size == size
    assert size == 0 or (found.indices.min() >= 0 and found.indices.max() < n)
    assert np.isfinite(found.scores).all()
    assert found.value == pytest.approx(worth(f, found.indices.tolist()) if size else 0.0, abs=1e-8)
    assert found.certificate.gap is None or found.certificate.gap >= 0
