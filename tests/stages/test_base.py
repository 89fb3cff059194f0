"""The table of stages, and what `finish` lets be published."""

import pytest

from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.base import STAGES, Check, finish
from tests.project import SNAPSHOT_STAGES, Project


def test_the_table_is_in_an_order_that_can_run() -> None:
    seen: set[str] = set()
    for name, stage in STAGES.items():
        assert name == stage.name
        inputs = {*stage.inputs, *(optional for optional, _ in stage.optional)}
        assert inputs <= seen, name
        assert stage.about.endswith(".")
        assert stage.partitioned or all(not STAGES[i].partitioned for i in inputs), name
        seen.add(name)
    assert {name for name, stage in STAGES.items() if stage.partitioned} >= set(SNAPSHOT_STAGES)


def test_a_moved_model_or_label_file_changes_no_identity(project: Project) -> None:
    stage = STAGES["edu_classifier"]
    moved = project.settings.replace({"score.edu_labels": "/moved/edu.parquet", "models.encoder": "/moved/encoder"})
    assert stage.identity(moved) == stage.identity(project.settings)
    assert stage.code_version(moved) != stage.code_version(project.settings)


@pytest.mark.parametrize(
    ("expected", "rows_in", "counts", "check", "published"),
    [
        (3, 3, {"good": 2, "bad": 1}, None, True),
        (0, 0, {}, None, True),
        (3, 3, {"good": 2}, None, False),
        (4, 3, {"good": 3}, None, False),
        (3, 3, {"good": 3}, Check("c", False, True, {}), False),
        (3, 3, {"good": 3}, Check("c", False, False, {}), True),
        (3, 3, {"good": 3}, Check("c", True, True, {}), True),
    ],
)
def test_only_what_is_accounted_for_and_passes_is_published(
    project: Project, expected: int, rows_in: int, counts: dict[str, int], check: Check | None, published: bool
) -> None:
    store: Store = project.store
    with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        (generation.folder / "s.parquet").write_bytes(b"x")
        record = generation.complete("s", ".parquet", rows=1, rows_in=rows_in, counts=counts)
        outcome = finish(
            generation,
            [record],
            ".parquet",
            facts={"k": 1},
            expected_rows=expected,
            figures=lambda done: {"drawn": done.fingerprint.encode()},
            checks=() if check is None else (check,),
        )
    assert (outcome.published is not None) == published == (store.published("a", "S") is not None)
    assert bool(outcome.figures) == published
    assert outcome.rows_in == rows_in
    assert outcome.counts == dict(sorted(counts.items()))
    assert [c.name for c in outcome.checks] == ["rows_accounted_for", *([] if check is None else ["c"])]
