"""The study: verdicts by their rules, intervals against plain resampling, and a small run from worlds to the page."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import spearmanr

from benchmarks.influence_study import estimates, page, statistics, study, text, worlds
from benchmarks.influence_study.claims import BAR, CLAIMS, Claim, Estimate, Quantity, above, below
from benchmarks.influence_study.planted import planted
from benchmarks.influence_study.subjects import HELD_OUT, SMOKE_TEXT, SMOKE_WORLD, TEXT, WORLD
from dagster_datamask.influence.relational import sides

SMALL = 100


def estimate(low: float, high: float, units: int = 9) -> Estimate:
    return Estimate((low + high) / 2, low, high, units, "runs")


def test_a_claim_is_decided_by_whole_intervals() -> None:
    claim = Claim(1, "", "", "", "", (above("a", ""), below("b", "")), (above("c", ""),))
    good = {"a": estimate(0.1, 0.2), "b": estimate(-2.0, -1.0), "c": estimate(-1.0, 1.0)}
    assert claim.verdict(good) == "reproduced"
    assert claim.verdict(good | {"a": estimate(-0.1, 0.5)}) == "not reproduced"
    assert claim.verdict(good | {"b": estimate(-1.0, 0.0)}) == "not reproduced"
    assert claim.verdict(good | {"a": estimate(0.1, 0.2, units=2)}) == "not decidable here"
    assert claim.verdict({"a": good["a"]}) == "not decidable here"


def test_a_rule_that_is_only_reached() -> None:
    step = Quantity("s", "", least=0.0, reaches=True)
    assert step.passes(estimate(-0.1, 0.01)) and not step.passes(estimate(-0.2, -0.1))
    both = Quantity("s", "", least=-0.1, most=0.1)
    assert both.passes(estimate(-0.05, 0.09)) and not both.passes(estimate(-0.2, 0.0))
    assert (step.rule, both.rule, Quantity("t", "").rule) == (
        "reaches > 0",
        "whole interval > -0.1 and < 0.1",
        "told",
    )


def test_ten_claims_are_registered_with_a_control_each() -> None:
    assert [claim.number for claim in CLAIMS] == list(range(1, 11))
    assert all(claim.tests and claim.control and claim.passes for claim in CLAIMS)
    assert all(test.rule != "told" for claim in (*CLAIMS, BAR) for test in claim.tests)
    keys = [test.key for claim in (*CLAIMS, BAR) for test in (*claim.tests, *claim.controls)]
    assert len(keys) == len(set(keys))


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(np.float64, (7, 3), elements=st.integers(-3, 3).map(float)),
    hnp.arrays(np.float64, (7, 3), elements=st.one_of(st.integers(-3, 3).map(float), st.just(np.nan))),
    st.integers(0, 100),
)
def test_a_resampled_correlation_is_that_of_the_resample(x: np.ndarray, y: np.ndarray, key: int) -> None:
    times = statistics.multiplicities(7, 20, key)
    for found, row in zip(statistics.resampled_spearman(x, y, times), times, strict=True):
        drawn = np.repeat(np.arange(7), row)
        a, b = x[drawn].ravel(), y[drawn].ravel()
        known = np.isfinite(b)
        a, b = a[known], b[known]
        if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
            assert np.isnan(found)
        else:
            assert found == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_within_positions_is_the_mean_of_each_position() -> None:
    x, y = (np.random.default_rng(k).normal(size=(30, 4)) for k in (0, 1))
    y[:, 1] += x[:, 1]
    times = statistics.multiplicities(30, 3, "within")
    assert times[0].tolist() == [1] * 30 and times.sum(axis=1).tolist() == [30] * 4
    found = statistics.resampled_within(x, y, times)[0]
    assert found == pytest.approx(np.mean([spearmanr(x[:, t], y[:, t]).statistic for t in range(4)]))


def test_an_interval_of_a_mean_is_about_two_standard_errors() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    found = statistics.interval(statistics.resampled_mean(values, 4000, "mean"), 400, "values")
    assert found.value == pytest.approx(values.mean())
    error = values.std() / 20
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_nested_intervals_hold_the_spread_between_worlds() -> None:
    # worlds differ by 1, seeds hardly at all: the mean of three drawn worlds has a variance of (2/3)/3
    runs = {(w, s): np.array([float(w) + 0.001 * s]) for w in range(3) for s in range(3)}
    found = statistics.nested(runs, "worlds", "between")
    assert found.value == pytest.approx(1.001) and found.units == 9
    assert found.low == pytest.approx(0.0, abs=0.34) and found.high == pytest.approx(2.0, abs=0.34)
    # where only resamples within a run vary, they make the interval
    normal = np.random.default_rng(0).normal(size=(9, 1 + 5000))
    normal[:, 0] = 0
    within = statistics.nested({(w, s): normal[3 * w + s] for w in range(3) for s in range(3)}, "worlds", "within")
    assert within.value == 0
    # nine runs drawn from nine with replacement: the mean of their squared shares is larger than 1/9
    assert 1.96 / 3 < within.high < 2 * 1.96 / 3


def test_one_run_alone_has_no_interval() -> None:
    found = estimates.estimates([{"place": "a text", "test": 4}], [{"across/learned": np.array([0.5])}])
    assert found["a text"]["across/learned"].units == 1 and np.isnan(found["a text"]["across/learned"].low)


def test_speed_is_the_slope_over_clusters() -> None:
    runs = [
        {"clusters": [10, 100], "seconds": [8.0 * k, 0.8 * k], "products": [1000, 100], "full": 80.0 * k}
        for k in (1, 2, 3)
    ]
    found = estimates.speed(runs)
    assert found["speed/slope"].value == pytest.approx(-1) and found["speed/slope"].units == 3
    assert found["speed/full"].high == pytest.approx(1)


def test_a_planted_relation_is_found() -> None:
    part = planted(replace(SMOKE_WORLD, probe=600, main=150, validation=20, test=60, steps=8, epochs=20, width=16))
    found = estimates.check(part, SMALL)
    assert found["check/law"].value > found["check/relational"].value > found["check/individual"].value > 0.5
    law, truth = np.array(part["predicted"]["law"]), np.array(part["increments"])
    assert (truth - law).std() == pytest.approx(law.std() / 2, rel=0.1)


def test_products_of_the_greedy_are_counted() -> None:
    assert study._products(20, 1) == 20 * 1
    assert study._products(40, 1) == 40 * 3


def test_sizes_fit_each_other_and_the_bar() -> None:
    every = study.jobs(count=3, seeds=3)
    assert len([job for job in every if job.place == worlds.PLACE]) == 9
    assert (WORLD.choose_from, WORLD.choose) == (128, 16)
    for sizes in (WORLD, TEXT, SMOKE_WORLD, SMOKE_TEXT):
        assert sizes.main in sizes.counts and list(sizes.counts) == sorted(sizes.counts)
        assert sizes.pools * sizes.choose_from <= sizes.pool and sizes.brute <= sizes.pools
        assert sizes.drift <= sizes.test * sizes.steps
    assert 1.3e6 < TEXT.model.vocabulary * TEXT.model.width + 12 * TEXT.model.layers * TEXT.model.width**2 < 1.7e6


@pytest.fixture(scope="module")
def world_zero(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, study.Job]:
    folder = tmp_path_factory.mktemp("study")
    job = study.Job(worlds.PLACE, 0, 0, SMOKE_WORLD)
    told: list[int] = []
    study.one(job, folder, told.append)
    # what progress promises is what is done
    assert sum(told) == SMOKE_WORLD.planned(0)
    return folder, job


@pytest.fixture(scope="module")
def result(world_zero: tuple[Path, study.Job]) -> dict[str, Any]:
    folder, job = world_zero
    found = study.kept(job, folder)
    assert found is not None
    return found


def test_parts_of_a_world_have_no_document_in_common() -> None:
    subject = worlds.of_world(1, 0, SMOKE_WORLD, lambda _: None)
    sets = [subject.probe, subject.test, subject.pool]
    ids = [id_ for part in sets for id_ in part.ids]
    assert len(ids) == len(set(ids)) == 120 + 8 * 4 + 100
    rows = [row.tobytes() for part in sets for row in part.tokens]
    rows += [row.tobytes() for row in (*subject.reference.tokens, *subject.held_out.tokens)]
    assert len(rows) == len(set(rows))
    held = sides(subject.probe.ids, 0, HELD_OUT)
    assert 4 <= held.sum() < 60
    assert subject.later.step == subject.checkpoint.step + SMOKE_WORLD.later
    assert subject.best is not None and 0 < subject.best.size < 60


def test_what_is_kept_can_be_checked_by_hand(result: dict[str, Any]) -> None:
    chosen = result["chosen"]
    forced = chosen["forced"][0]
    # greedy: no other first document, and so no shorter sum after one choice
    assert forced["paths"]["brute force"][0] == pytest.approx(forced["paths"]["oracle individual"][0])
    assert forced["brute force"] == pytest.approx(forced["paths"]["brute force"][-1])
    assert forced["overlap"]["1"] == 1.0
    assert len(chosen["sums"]["relational"]) == SMOKE_WORLD.pools
    assert np.array(result["tests"]["random"]["increments"]).shape == (SMOKE_WORLD.test, SMOKE_WORLD.steps)
    assert result["drift"]["first"] == result["drift"]["again"] != result["drift"]["later"]
    losses = result["continued"]["losses"]
    assert {"group", "individual", "individual in clusters", "gumbel", "best", "random 0"} <= set(losses)
    for found in losses.values():
        # documents of one length: the mean over tokens is that over documents
        assert found["loss"] == pytest.approx(np.mean(found["documents"]))


def test_estimates_are_differences_of_what_is_kept(result: dict[str, Any]) -> None:
    found = estimates.replicates(result, SMALL)
    test = result["tests"]["random"]
    truth = np.ravel(test["increments"])
    rho = {name: spearmanr(np.ravel(p), truth).statistic for name, p in test["predicted"].items() if name != "shuffled"}
    assert found["relational/pooled"][0] == pytest.approx(rho["cosine"] - rho["individual"])
    assert found["similarity/pooled"][0] == pytest.approx(rho["clamped"] - rho["dot"])
    assert found["bootstrap/random"][0] == pytest.approx(rho["with bootstrap"] - rho["cosine"])
    assert found["trajectories/all"][0] == pytest.approx(rho["cosine 16"] - rho["cosine 6"])
    sums = result["chosen"]["sums"]
    assert found["chosen/individual"][0] == pytest.approx(np.mean(sums["relational"]) - np.mean(sums["individual"]))
    assert found["bar/brute force"][0] == pytest.approx(
        sums["relational"][0] - result["chosen"]["forced"][0]["brute force"]
    )
    losses = result["continued"]["losses"]
    assert found["continued/individual"][0] == pytest.approx(losses["group"]["loss"] - losses["individual"]["loss"])
    random = np.mean([losses[f"random {k}"]["loss"] for k in range(3)])
    assert found["continued/random"][0] == pytest.approx(losses["group"]["loss"] - random)
    assert found["drift/same"][0] == pytest.approx(1.0)
    named = {test.key for claim in (*CLAIMS, BAR) for test in (*claim.tests, *claim.controls)}
    assert {key for key in named if not key.startswith("speed/")} <= set(found)


def test_a_stopped_study_goes_on_and_a_changed_one_begins_again(
    world_zero: tuple[Path, study.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job = world_zero
    monkeypatch.setattr(study, "_measure", lambda missing, *_: pytest.fail(f"measured again: {missing}"))
    assert study.run([job], folder, 1, lambda _: None)[0]["name"] == "world 0, seed 0"
    assert study.kept(replace(job, sizes=replace(SMOKE_WORLD, epochs=3)), folder) is None
    assert study.kept(replace(job, seed=1), folder) is None


def test_two_runs_find_the_same_to_the_bit(result: dict[str, Any], tmp_path: Path) -> None:
    job = study.Job(worlds.PLACE, 0, 0, SMOKE_WORLD)
    study.run([job], tmp_path, 2, lambda _: None)
    again = json.loads((tmp_path / job.file).read_text("utf-8"))
    for told in ("cpu_seconds", "machine"):
        again.pop(told)
    assert again == {name: value for name, value in result.items() if name in again}


@pytest.mark.skipif(not text.is_there(), reason="the shared web pages are not there")
def test_references_of_real_text_are_disjoint() -> None:
    for name in text.REFERENCES:
        sets = text.split(name, TEXT)
        texts = [example.text for part in sets.values() for example in part]
        assert [len(part) for part in sets.values()] == [TEXT.reference, TEXT.held_out]
        assert len(texts) == len(set(texts))


@pytest.mark.skipif(not text.is_there(), reason="the shared web pages are not there")
@pytest.mark.slow
def test_real_text_runs_at_toy_size(tmp_path: Path) -> None:
    job = study.Job("WikiText-2", 0, 1, SMOKE_TEXT)
    study.one(job, tmp_path, lambda _: None)
    found = study.kept(job, tmp_path)
    assert found is not None and found["place"] == "WikiText-2"
    parts = estimates.estimates([found], [estimates.replicates(found, SMALL)])["WikiText-2"]
    assert parts["overlap/slope"].units == SMOKE_TEXT.brute == 3


def test_the_page_tells_every_claim(result: dict[str, Any], tmp_path: Path) -> None:
    found = estimates.estimates([result], [estimates.replicates(result, SMALL)])
    runs = [
        {"documents": n, "clusters": [10, 100], "seconds": [9.0, 0.9], "products": [1000, 100], "full": 90.0}
        for n in (1, 2, 3)
    ]
    found[worlds.PLACE] |= estimates.speed(runs) | estimates.check(planted(SMOKE_WORLD), SMALL)
    speed = {"runs": runs, "machine": {"load": 0.0}}
    page.write(tmp_path, [result], speed, found, {worlds.PLACE: SMOKE_WORLD})
    written = (tmp_path / page.FILE).read_text("utf-8")
    for claim in CLAIMS:
        assert f"## {claim.number}. {claim.claim}" in written and f"| {claim.number} | {claim.claim} |" in written
    (nine,) = re.findall(r"^\| 9 \|.*$", written, re.MULTILINE)
    assert "**reproduced**: -1.000 [-1.000, -1.000]" in nine
    assert "not reproduced: " in written or "not decidable here: " in written
    pictures = re.findall(r"\]\((figures/[^)]+)\)", written)
    assert len(pictures) == 7
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
