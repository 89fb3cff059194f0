"""Baselines against their definitions, for any sharding and budget; and every strategy through all that follows it."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dagster_datamask import keyed
from dagster_datamask.scoring.regression import int_score
from dagster_datamask.selection.budgets import Budget
from dagster_datamask.settings import SettingsError, load_settings
from dagster_datamask.shards.order import tie_hash
from dagster_datamask.shards.schemas import MASKS
from dagster_datamask.stages import baselines, export, sql
from dagster_datamask.stages.apply import apply_manifest
from dagster_datamask.stages.base import STAGES, Outcome, lineage, mask_of
from dagster_datamask.stages.baselines import BASELINES, fill, int_scores
from dagster_datamask.stages.manifest import SIDECAR
from tests.conftest import SNAPSHOTS
from tests.project import Project
from tests.stages.conftest import copied, failed, rows_of, tree
from tests.stages.synthetic import DIMENSION, SNAPSHOT, Row, project
from tests.stages.test_near_duplicates import by_definition, stands_for, vectors_of

Finished = tuple[Project, dict[str, Outcome]]

# an example writes a dozen files: shrinking one would take minutes
FOUND = (Phase.explicit, Phase.reuse, Phase.generate)
# {baseline of scores: (what its score is, what of it passes)}
RULES: dict[str, tuple[Callable[[Row], float | None], Callable[[float], bool] | None]] = {
    "baseline_fineweb_edu": (lambda r: r.edu, lambda score: int_score(score) >= 3),
    "baseline_fineweb_edu_top": (lambda r: r.edu, None),
    "baseline_dclm": (lambda r: r.dclm, lambda score: score >= 0.018112),
    "baseline_dclm_top": (lambda r: r.dclm, None),
    "baseline_wiki": (lambda r: r.wiki, lambda score: score >= 0.25),
    "baseline_wiki_top": (lambda r: r.wiki, None),
    "baseline_ultra_fineweb": (lambda r: r.ultra, lambda score: score >= 0.5),
}
OF_SCORES = ("baseline_random", *RULES)
OF_VECTORS = ("baseline_semdedup", "baseline_diversity", "baseline_quality")


def by_tie(rows: Sequence[Row], key: Callable[[Row], float]) -> list[Row]:
    """Sorted by a key, ties by the hash of the id."""
    ties = tie_hash([r.id for r in rows]).tolist()
    return [r for _, _, r in sorted(((key(r), tie, r) for r, tie in zip(rows, ties, strict=True)), key=lambda t: t[:2])]


def drawn(rows: Sequence[Row], name: str, seed: int) -> list[Row]:
    """By a hash keyed by the seed and the baseline's name, the largest first."""
    hashes = dict(zip([r.id for r in rows], keyed.hash64([r.id for r in rows], seed, name).tolist(), strict=True))
    return sorted(rows, key=lambda r: -hashes[r.id])


def within(order: Sequence[Row], amount: int, in_tokens: bool) -> set[str]:
    """The ids that fill a budget in an order: of tokens, whatever still fits."""
    kept = set()
    for row in order:
        cost = row.tokens if in_tokens else 1
        if cost <= amount:
            kept.add(row.id)
            amount -= cost
    return kept


def by_rule(name: str, rows: Sequence[Row], amount: int, in_tokens: bool, seed: int = 0) -> tuple[set[str], list[Row]]:
    """(ids that a baseline of scores keeps, what passes in the order that fills the budget)."""
    scored = [r for r in rows if r.scored]
    if name == "baseline_random":
        order = drawn(scored, name, seed)
    else:
        score, passes = RULES[name]
        there = [r for r in scored if score(r) is not None]
        if passes is None:
            order = by_tie(there, lambda r: -(score(r) or 0.0))
        else:
            order = drawn([r for r in there if passes(score(r) or 0.0)], name, seed)
    return within(order, amount, in_tokens), order


@st.composite
def documents(draw: st.DrawFn) -> list[Row]:
    """Up to 14 documents: scores with ties and without, pruned ones, duplicates, ones without a score."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def score(values: Sequence[float]) -> float | None:
        return None if rng.random() < 0.15 else float(rng.choice(values))

    return [
        Row(
            f"d{k}",
            quality=None if rng.random() < 0.1 else float(rng.integers(0, 4)),
            decision=rng.choice([None, None, None, "pruned", "duplicate"]),
            edu=score([2.4, 2.5, 2.51, 3.5, -0.1, 5.4]),
            dclm=score([0.018112, 0.018111, 0.9]),
            wiki=score([0.25, 0.2499, 0.8]),
            ultra=score([0.5, 0.4999, 0.7]),
            tokens=int(rng.integers(1, 9)),
            vector=rng.normal(size=DIMENSION).tolist(),
            cluster=int(rng.integers(0, 2)),
            closeness=float(rng.integers(0, 3)) / 3,
        )
        for k in range(draw(st.integers(0, 14)))
    ]


@given(documents(), st.sampled_from(OF_SCORES), st.floats(0, 1), st.booleans(), st.integers(1, 3), st.data())
@settings(max_examples=24, deadline=None, phases=FOUND)
def test_a_baseline_of_scores_is_its_rule_for_any_order_and_sharding(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    name: str,
    share: float,
    in_tokens: bool,
    shards: int,
    data: st.DataObject,
) -> None:
    rows = data.draw(st.permutations(rows))
    scored = [r for r in rows if r.scored]
    amount = int(share * (sum(r.tokens for r in scored) if in_tokens else len(scored)))
    budget = f"{amount}tok" if in_tokens else str(amount)
    own = project(tmp_path_factory.mktemp("b"), [rows[k::shards] for k in range(shards)], **{"select.budget": budget})
    outcome = own.stage(name, SNAPSHOT)
    told = rows_of(outcome.published)
    expected, order = by_rule(name, rows, amount, in_tokens)

    assert set(told.filter("selected")["doc_id"]) == expected
    assert told.schema.names() == MASKS.names
    assert told["doc_id"].to_list() == [r.id for k in range(shards) for r in rows[k::shards] if r.scored]
    by_rank = told.sort("rank")
    assert by_rank["rank"].to_list() == list(range(1, len(scored) + 1))
    assert by_rank["doc_id"].to_list()[: len(order)] == [r.id for r in order]
    facts = outcome.facts
    available = sum(r.tokens if in_tokens else 1 for r in order)
    assert (facts["n"], facts["documents"], facts["passing"]) == (len(scored), len(scored), len(order))
    assert (facts["budget"], facts["short_by"]) == (amount, max(0, amount - available))
    assert facts["kept"] == len(expected)
    kept = [r for r in scored if r.id in expected]
    weights = [r.tokens if in_tokens else 1 for r in kept]
    assert facts["tokens"] == (sum(weights) if in_tokens else None)
    if kept:
        mean = math.fsum(w * (r.quality or 0.0) for w, r in zip(weights, kept, strict=True)) / sum(weights)
        assert facts["quality_raw"] == pytest.approx(mean)
    rule = RULES.get(name)
    for row, got in zip([r for k in range(shards) for r in rows[k::shards] if r.scored], told.to_dicts(), strict=True):
        if rule is not None:
            assert got["score"] == rule[0](row)
            if got["score"] is None:
                assert got["reason"] == "null score: no_tokens"
            elif rule[1] is not None and not rule[1](got["score"]):
                assert got["reason"] == "below the threshold"
            else:
                assert got["reason"] is None


@given(documents(), st.floats(0, 1), st.booleans(), st.integers(1, 3), st.data())
@settings(max_examples=10, deadline=None, phases=FOUND)
def test_semdedup_keeps_what_is_least_like_an_earlier_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    share: float,
    in_tokens: bool,
    shards: int,
    data: st.DataObject,
) -> None:
    rows = data.draw(st.permutations(rows))
    survivors = [r for r in rows if r.survives]
    amount = int(share * (sum(r.tokens for r in survivors) if in_tokens else len(survivors)))
    budget = f"{amount}tok" if in_tokens else str(amount)
    own = project(tmp_path_factory.mktemp("s"), [rows[k::shards] for k in range(shards)], **{"select.budget": budget})
    outcome = own.stage("baseline_semdedup", SNAPSHOT)
    told = rows_of(outcome.published)
    found = by_definition(survivors)
    order = by_tie(survivors, lambda r: -2.0 if found[r.id][1] is None else found[r.id][0])
    expected = within(order, amount, in_tokens)
    assert set(told.filter("selected")["doc_id"]) == expected
    assert told.sort("rank")["doc_id"].to_list() == [r.id for r in order]
    # bisection's epsilon: "drop above 1 − ε" leaves all that is kept
    assert all(found[name][0] <= 1 - outcome.facts["epsilon"] + 1e-6 for name in expected)
    z = dict(zip([r.id for r in survivors], vectors_of(survivors), strict=True)) if survivors else {}
    for row in told.filter(~pl.col("selected")).to_dicts():
        other = stands_for(row["doc_id"], found, expected)
        assert row["kept_id"] == other
        assert row["reason"] == (None if other is None else "near_duplicate")
        if other is not None:
            assert row["similarity"] == pytest.approx(float(z[row["doc_id"]] @ z[other]), abs=1e-6)
    assert told.filter("selected")["kept_id"].null_count() == len(expected)


def pool() -> list[Row]:
    rng = np.random.default_rng(3)
    return [
        Row(
            f"d{k}",
            quality=float(rng.integers(0, 5)),
            decision="pruned" if k % 4 == 0 else None,
            tokens=int(rng.integers(1, 9)),
            vector=rng.normal(size=DIMENSION).tolist(),
        )
        for k in range(13)
    ]


def test_diversity_is_the_best_mask_there_is_and_its_bound_proves_it(tmp_path: Path) -> None:
    rows = pool()
    own = project(tmp_path, [rows[:5], rows[5:]], **{"select.budget": "3"})
    outcome = own.stage("baseline_diversity", SNAPSHOT)
    survivors = [r for r in rows if r.survives]
    z = vectors_of(survivors)
    best = max(-float(np.square(z[list(mask)].mean(axis=0)).sum()) for mask in itertools.combinations(range(len(z)), 3))
    assert outcome.facts["value"] == pytest.approx(best, abs=1e-9)
    assert outcome.facts["certificate"]["gap"] >= 0
    assert outcome.facts["certificate"]["upper_bound"] >= best
    kept = rows_of(outcome.published).filter("selected")["doc_id"]
    chosen = z[[k for k, r in enumerate(survivors) if r.id in set(kept)]]
    assert -float(np.square(chosen.mean(axis=0)).sum()) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("pieces", [1, 3])
def test_quality_keeps_the_best_of_what_pruning_left(tmp_path: Path, pieces: int) -> None:
    rows = pool()
    own = project(tmp_path, [rows[k::pieces] for k in range(pieces)], **{"select.budget": "4"})
    outcome = own.stage("baseline_quality", SNAPSHOT)
    told = rows_of(outcome.published)
    order = by_tie([r for r in rows if r.survives], lambda r: -(r.quality or 0.0))
    assert set(told.filter("selected")["doc_id"]) == {r.id for r in order[:4]}
    assert told.sort("rank")["doc_id"].to_list() == [r.id for r in order]
    assert outcome.facts["value"] == outcome.facts["quality_raw"] == sum(r.quality or 0.0 for r in order[:4]) / 4
    assert outcome.facts["certificate"]["gap"] == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(0, 200), st.integers(1, 7))
def test_filling_is_that_of_a_budget_in_memory(costs: list[int], amount: int, block: int) -> None:
    amount = min(amount, sum(costs))
    marks = np.zeros(len(costs), dtype=bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "SIDE_ROWS", block)
        fill(np.array(costs, np.int64), amount, marks)
    order = -np.arange(len(costs), dtype=np.float64)
    in_memory = Budget((amount,), np.array(costs, np.int64)).fill(order, np.arange(len(costs), dtype=np.uint64))
    assert np.flatnonzero(marks).tolist() == in_memory.tolist()


@given(st.lists(st.floats(-10, 10) | st.sampled_from([0.5, 1.5, 2.5, 3.5, 4.5, -0.5, 5.5]), max_size=30))
def test_integer_scores_are_those_of_one_score(scores: list[float]) -> None:
    assert int_scores(np.array(scores, np.float64)).tolist() == [int_score(score) for score in scores]


@pytest.mark.parametrize("name", [*OF_SCORES, *OF_VECTORS])
class TestEveryBaseline:
    @pytest.mark.parametrize("rows", [0, 1, 2])
    def test_hardly_any_documents(self, tmp_path: Path, name: str, rows: int) -> None:
        own = project(tmp_path, [[Row(f"d{k}", edu=3.0) for k in range(rows)], []], **{"select.budget": "100%"})
        outcome = own.stage(name, SNAPSHOT)
        told = rows_of(outcome.published)
        assert told["selected"].to_list() == [True] * rows
        assert sorted(told["rank"]) == list(range(1, rows + 1))
        assert outcome.facts["kept"] == outcome.facts["budget"] == rows
        assert own.with_settings(**{"select.budget": "0"}).stage(name, SNAPSHOT).facts["kept"] == 0

    def test_nothing_one_all_and_more_than_all(self, tmp_path: Path, name: str) -> None:
        rows = [
            Row(f"d{k}", edu=3.0 + k, tokens=k + 1, vector=np.eye(DIMENSION)[k % 4].tolist(), closeness=k / 9)
            for k in range(5)
        ]
        own = project(tmp_path, [rows[:2], rows[2:]])
        for budget, kept in (("0", 0), ("1", 1), ("5", 5), ("0tok", 0), ("15tok", 5)):
            outcome = own.with_settings(**{"select.budget": budget}).stage(name, SNAPSHOT)
            assert outcome.facts["kept"] == len(rows_of(outcome.published).filter("selected")) == kept
            assert outcome.facts["short_by"] == 0
        for budget, why in (("6", "5 documents"), ("16tok", "15 tokens")):
            with pytest.raises(SettingsError, match=f"snapshot S: budget .* asks for more than the {why}"):
                own.with_settings(**{"select.budget": budget}).stage(name, SNAPSHOT)

    def test_what_was_done_is_not_done_again_and_has_the_same_bytes(self, tmp_path: Path, name: str) -> None:
        rows = pool()
        trees = []
        for folder in ("first", "second"):
            own = project(tmp_path / folder, [rows[:7], rows[7:]], **{"select.budget": "3"})
            own.stage(name, SNAPSHOT)
            trees.append(tree(own.store.folder(name, SNAPSHOT)))
        assert trees[0] == trees[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(BASELINES, name, lambda work: pytest.fail("made again"))
            own.stage(name, SNAPSHOT)
        assert tree(own.store.folder(name, SNAPSHOT)) == trees[1]


def test_every_baseline_of_the_table_is_a_stage_an_asset_and_a_strategy() -> None:
    assert set(BASELINES) == {name for name in STAGES if name.startswith("baseline_")}
    for name in BASELINES:
        found = load_settings("/dev/null", [f"select.strategy={name}"], env={})
        assert mask_of(found) == name
        assert name in lineage(["fineweb_mask_manifest"], found)
        assert "datamask_masks" not in lineage(["fineweb_mask", "snapshot_report"], found)


def test_another_seed_draws_others_and_the_top_stays(tmp_path: Path) -> None:
    rows = [Row(f"d{k}", edu=3.0 + k / 100) for k in range(60)]
    own = project(tmp_path, [rows], **{"select.budget": "20"})
    other = own.with_settings(**{"select.seed": 1})
    for name, same in (("baseline_random", False), ("baseline_fineweb_edu", False), ("baseline_fineweb_edu_top", True)):
        kept = [set(rows_of(p.stage(name, SNAPSHOT).published).filter("selected")["doc_id"]) for p in (own, other)]
        assert (kept[0] == kept[1]) == same, name
        assert kept[1] == by_rule(name, rows, 20, False, seed=1)[0]


def test_too_few_that_pass_are_all_kept_and_counted(tmp_path: Path) -> None:
    rows = [Row(f"d{k}", edu=float(k)) for k in range(5)]
    outcome = project(tmp_path, [rows], **{"select.budget": "4"}).stage("baseline_fineweb_edu", SNAPSHOT)
    assert set(rows_of(outcome.published).filter("selected")["doc_id"]) == {"d3", "d4"}
    assert {k: outcome.facts[k] for k in ("budget", "passing", "kept", "short_by")} == {
        "budget": 4,
        "passing": 2,
        "kept": 2,
        "short_by": 2,
    }


def test_a_document_without_a_count_is_named_under_a_token_budget(tmp_path: Path) -> None:
    own = project(tmp_path, [[Row("good"), Row("bad", tokens=0)]], **{"select.budget": "5tok"})
    with pytest.raises(SettingsError, match=r"of S, shard 000, document 'bad' has token_count 0"):
        own.stage("baseline_random", SNAPSHOT)


def test_a_corpus_s_number_of_documents_is_no_budget_of_a_snapshot(tmp_path: Path) -> None:
    own = project(tmp_path, [[Row("a")]], **{"select.scope": "corpus", "select.solver": "certified"})
    assert own.with_settings(**{"select.budget": "100%"}).stage("baseline_random", SNAPSHOT).facts["kept"] == 1
    with pytest.raises(
        SettingsError, match=r"select.budget = 1 is for the corpus, and baseline_random .* take a share"
    ):
        own.with_settings(**{"select.budget": "1"}).stage("baseline_random", SNAPSHOT)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["select.strategy=baseline_fineweb-edu"], "did you mean 'baseline_fineweb_edu'?"),
        (["select.strategy=baseline_random", "select.quota=domain"], "baseline_random chooses each snapshot by itself"),
        (
            ["select.strategy=baseline_random", "select.scope=corpus", "select.solver=certified"],
            "set select.scope to split or snapshot",
        ),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings("/dev/null", overrides, env={})
    assert why in str(error.value)


FIRST = SNAPSHOTS[0]


@pytest.fixture(scope="module")
def following(
    finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Project, dict[str, Outcome]]]:
    """The finished project under another strategy, with all that follows the mask, made once a strategy."""
    made: dict[str, tuple[Project, dict[str, Outcome]]] = {}

    def run(strategy: str) -> tuple[Project, dict[str, Outcome]]:
        if strategy not in made:
            own = copied(finished[0], tmp_path_factory.mktemp(strategy) / "root")
            own = own.with_settings(**{"select.strategy": strategy})
            names = (strategy, "fineweb_mask_manifest", "fineweb_mask", "snapshot_report")
            with pytest.MonkeyPatch.context() as patch:
                if strategy != "baseline_random":
                    # drawing takes most of a report's time; the first strategy has documents without a vector, too
                    patch.setattr("dagster_datamask.stages.report.figures", lambda *numbers: [])
                    patch.setattr("dagster_datamask.stages.selection_report.figures", lambda *numbers: [])
                outcomes = {name: own.stage(name, FIRST) for name in names}
                outcomes["selection_report"] = own.stage("selection_report", "")
            outcomes["dataset_card"] = export.dataset_card(own.run())
            made[strategy] = own, outcomes
        return made[strategy]

    return run


@pytest.mark.parametrize(
    "strategy", ["baseline_random", "baseline_fineweb_edu", "baseline_semdedup", "baseline_quality"]
)
class TestEveryStrategy:
    def test_all_that_follows_is_published(self, following: Callable, strategy: str) -> None:
        for name, outcome in following(strategy)[1].items():
            assert outcome.published is not None, name
            blocking = {check.name for check in outcome.checks if check.blocking and not check.passed}
            assert not blocking, name

    def test_the_manifest_keeps_its_mask(self, finished: Finished, following: Callable, strategy: str) -> None:
        _, outcomes = following(strategy)
        rows = rows_of(outcomes["fineweb_mask_manifest"].published)
        mask = rows_of(outcomes[strategy].published)
        before = rows_of(finished[1]["pruned_documents"].published)
        assert set(rows["strategy"]) == {strategy}
        assert set(rows.filter(pl.col("decision") == "kept")["doc_id"]) == set(mask.filter("selected")["doc_id"])
        inside = rows.filter(pl.col("doc_id").is_in(mask["doc_id"].to_list()))
        assert set(inside["decision"]) == {"kept", "not_selected"}
        assert set(inside["stage"]) == {strategy}
        assert inside["score"].to_list() == mask["score"].to_list()
        assert inside["reason"].to_list() == mask["reason"].to_list()
        outside = rows.filter(~pl.col("doc_id").is_in(mask["doc_id"].to_list()))
        assert outside["decision"].to_list() == (
            before.filter(pl.col("doc_id").is_in(outside["doc_id"].to_list()))["decision"].to_list()
        )
        # of scores: all that have a quality; of vectors: what pruning left
        assert len(mask) == (36 if strategy in OF_VECTORS else 65)

    def test_its_sidecar_says_what_it_is(self, following: Callable, strategy: str) -> None:
        _, outcomes = following(strategy)
        sidecar = json.loads((outcomes["fineweb_mask_manifest"].published.folder / SIDECAR).read_text())
        assert sidecar["strategy"] == sidecar["settings"]["select.strategy"] == strategy
        assert sidecar["budget"] == {"asked": 7, "met": 7, "unit": "documents", "n": 65, "short_by": 0}
        certificate = sidecar["certificate"]
        if strategy == "baseline_quality":
            assert certificate["gap"] >= 0
        else:
            assert certificate["gap"] is None
            assert certificate["reason"] == f"{strategy} maximises no objective"
        assert strategy in sidecar["fingerprints"] and "datamask_masks" not in sidecar["fingerprints"]

    def test_pages_and_card_name_it(self, following: Callable, strategy: str) -> None:
        _, outcomes = following(strategy)
        html = outcomes["snapshot_report"].published.path("report").read_text("utf-8")
        assert f"What {strategy} kept of {FIRST}" in html
        # datamask_masks is one to compare with now
        assert [row["selection"] for row in outcomes["snapshot_report"].facts["selections"]] == [strategy, "DataMask"]
        assert f"What {strategy} kept of 1 snapshots" in outcomes["selection_report"].published.path(
            "report"
        ).read_text("utf-8")
        readme = (outcomes["dataset_card"].published.folder / "dataset" / "README.md").read_text("utf-8")
        assert f"selected by {strategy}" in readme and "jointly" not in readme

    def test_ids_lead_back_to_its_documents(self, following: Callable, tmp_path: Path, strategy: str) -> None:
        own, outcomes = following(strategy)
        folder = outcomes["fineweb_mask_manifest"].published.folder
        told = apply_manifest(folder, own.source, tmp_path / "out")
        assert (told["wanted"], told["found"], told["missing"], told["rows"]) == (7, 7, 0, 7)
        files = sorted((tmp_path / "out").rglob("*.parquet"))
        assert set(pl.read_parquet(files)["id"]) == set(rows_of(outcomes["fineweb_mask"].published)["doc_id"])

    def test_sql_has_its_mask(self, following: Callable, strategy: str) -> None:
        own, _ = following(strategy)
        answer = sql.query(
            own.store,
            f"SELECT count(*) FILTER (selected), count(*) FILTER (decision = 'kept') FROM {strategy} "
            "JOIN manifest USING (snapshot, doc_id)",
        )
        assert answer.rows == [[7, 7]]


def test_a_mask_of_other_thresholds_is_refused(following: Callable, tmp_path: Path) -> None:
    own, _ = following("baseline_fineweb_edu")
    changed = copied(own, tmp_path / "root").with_settings(**{"baselines.edu_cut": 2})
    outcome = changed.stage("fineweb_mask_manifest", FIRST)
    assert outcome.published is None
    assert failed(outcome)["made_under_these_settings"]["different"] == (
        "baseline_fineweb_edu: baselines.edu_cut = 3 (in force: 2)"
    )


def test_ultra_fineweb_s_scores_are_checked_like_the_others(finished: Finished, tmp_path: Path) -> None:
    own = copied(finished[0], tmp_path / "root").with_settings(**{"select.strategy": "baseline_ultra_fineweb"})
    own.stage("ultra_classifier", "")
    for name in ("ultra_scores", "baseline_ultra_fineweb"):
        own.stage(name, FIRST)
    published = own.stage("fineweb_mask_manifest", FIRST).published
    assert published is not None
    sidecar = json.loads((published.folder / SIDECAR).read_text())
    assert set(sidecar["models"]) == {"dclm", "edu", "wiki", "ultra", "encoder"}
    changed = own.with_settings(
        **{"score.ultra_labels": own.settings.score.wiki_labels, "models.ultra_label": "__label__x"}
    )
    why = failed(changed.stage("fineweb_mask_manifest", FIRST))["made_under_these_settings"]["different"]
    assert "ultra_scores: models.ultra_label = '__label__pos' (in force: '__label__x')" in why
