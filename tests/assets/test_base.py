"""A snapshot's run as Dagster records it: metadata, checks, versions, failures."""

import base64
import re
import shutil
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.definitions.data_version import extract_data_version_from_entry

from dagster_datamask.assets.base import COLUMN_DESCRIPTIONS, _nested
from dagster_datamask.assets.documents import raw_shards
from dagster_datamask.definitions import build_definitions
from dagster_datamask.resources.config import config_class
from dagster_datamask.settings import Settings
from dagster_datamask.shards import schemas
from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.base import FITTED, STAGES
from dagster_datamask.stages.group_selection import CHOSEN
from dagster_datamask.stages.influence import scored
from tests.assets.conftest import Ran, execute, failure, materialised
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project, settings_for, write_shard

FIRST, SECOND = SNAPSHOTS
GLOBAL = set(FITTED)
TABLES = tuple(name for name in SNAPSHOT_STAGES if STAGES[name].group != "reports")


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, dg.MetadataValue]:
    (materialization,) = result.asset_materializations_for_node(asset)
    return dict(materialization.metadata)


def store(settings: Settings) -> Store:
    return Store(Path(settings.storage.root))


def images(found: dict[str, dg.MetadataValue]) -> list[str]:
    return [name for name, value in found.items() if isinstance(value, dg.MarkdownMetadataValue)]


def test_every_column_of_our_own_files_is_described() -> None:
    declared = [schema for schema in vars(schemas).values() if isinstance(schema, pa.Schema)]
    assert schemas.SUBSTRINGS in declared
    for schema in (*declared, CHOSEN, scored(8)):
        assert not [name for name in schema.names if name not in COLUMN_DESCRIPTIONS], schema


def test_a_tables_names_come_before_its_numbers() -> None:
    rows = [{"documents": 7, "mean": 1 / 3, "selection": "DataMask"}, {"documents": 0, "mean": None, "selection": "b"}]
    table = _nested(rows)
    assert isinstance(table, dg.TableMetadataValue)
    assert [list(record.data.items()) for record in table.records] == [
        [("selection", "DataMask"), ("documents", 7), ("mean", 0.333333)],
        [("selection", "b"), ("documents", 0), ("mean", None)],
    ]


class TestOneRun:
    def test_the_job_materialises_every_snapshot_asset_and_no_other(self, ran: Ran) -> None:
        assert ran.fit.success
        for snapshot in SNAPSHOTS:
            assert ran.full[snapshot].success
            assert materialised(ran.full[snapshot]) == set(SNAPSHOT_STAGES)

    def test_row_count_schema_and_fingerprint_are_those_of_what_was_published(self, ran: Ran) -> None:
        for name in SNAPSHOT_STAGES:
            found = metadata(ran.full[FIRST], name)
            published = store(ran.settings).current(name, FIRST)
            assert found["dagster/row_count"].value == published.rows, name
            assert found["fingerprint"].value == published.fingerprint, name
            assert Path(str(found["path"].value)) == published.folder, name
            if name in TABLES:
                assert found["dagster/column_schema"].value.columns[0].name in ("doc_id", "text"), name
            assert found["experiment"].value is False, name
            assert sum(v.value for k, v in found.items() if k.startswith("rows/")) == found["rows_in"].value, name

    def test_the_data_version_is_the_generation(self, ran: Ran) -> None:
        for name in SNAPSHOT_STAGES:
            (record,) = ran.instance.fetch_materializations(
                dg.AssetRecordsFilter(asset_key=dg.AssetKey(name), asset_partitions=[SECOND]), limit=1
            ).records
            version = extract_data_version_from_entry(record.event_log_entry)
            assert version == dg.DataVersion(store(ran.settings).current(name, SECOND).fingerprint), name

    def test_stages_on_the_accelerator_record_it_and_others_do_not(self, ran: Ran) -> None:
        for name in SNAPSHOT_STAGES:
            found = metadata(ran.full[FIRST], name)
            assert ("accelerator" in found) == STAGES[name].on_accelerator, name
            if "accelerator" in found:
                assert found["accelerator"].value == "cpu (CPU), float32"

    def test_settings_are_a_table_of_what_the_stage_reads(self, ran: Ran) -> None:
        for name in SNAPSHOT_STAGES:
            found = metadata(ran.full[FIRST], name)
            assert ("settings" in found) == bool(STAGES[name].reads), name
            if "settings" in found:
                told = {record.data["name"]: record.data["value"] for record in found["settings"].records}
                assert set(told) == set(STAGES[name].reads), name
        found = metadata(ran.full[FIRST], "datamask_masks")
        told = {record.data["name"]: record.data["value"] for record in found["settings"].records}
        assert told["select.lambda"] == "0.5" and told["select.solver"] == "certified"

    def test_no_metadata_is_a_blob(self, ran: Ran) -> None:
        """What is nested is short: the page of a materialisation is read, not scrolled."""
        for name in (*SNAPSHOT_STAGES, *FITTED):
            for key, value in metadata(ran.fit if name in FITTED else ran.full[FIRST], name).items():
                assert not isinstance(value, dg.JsonMetadataValue), (name, key)
                if isinstance(value, dg.TextMetadataValue):
                    assert len(str(value.value)) < 200, (name, key, value.value)
                if isinstance(value, dg.FloatMetadataValue):
                    assert value.value == float(f"{value.value:.8g}"), (name, key, value.value)
                if isinstance(value, dg.TableMetadataValue):
                    cells = [str(cell) for record in value.records for cell in record.data.values()]
                    assert not [cell for cell in cells if re.fullmatch(r"-?\d+\.\d{9,}", cell)], (name, key)

    def test_the_mask_tells_value_bound_and_gap_as_numbers(self, ran: Ran) -> None:
        found = metadata(ran.full[FIRST], "datamask_masks")
        assert found["kept"].value == found["budget"].value == 7
        # value and bound are told to eight digits
        assert 0 <= found["gap"].value == pytest.approx(found["upper_bound"].value - found["value"].value, abs=2e-8)
        for name in ("value", "upper_bound", "gap", "share", "quality", "diversity"):
            assert isinstance(found[name], dg.FloatMetadataValue), name
        first = ("kept", "budget", "unit", "short_by", "value", "upper_bound", "gap", "share", "baseline")
        assert tuple(found)[1 : 1 + len(first)] == first

    def test_figures_are_png_images_in_markdown(self, ran: Ran) -> None:
        drawn = {name: images(metadata(ran.full[FIRST], name)) for name in SNAPSHOT_STAGES}
        assert drawn["datamask_masks"] and drawn["fineweb_mask_manifest"] and drawn["quality_scores"]
        assert images(metadata(ran.fit, "dclm_classifier"))
        for name, figures in drawn.items():
            for figure in figures:
                text = str(metadata(ran.full[FIRST], name)[figure].value)
                match = re.fullmatch(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", text)
                assert match is not None, (name, figure)
                assert base64.b64decode(match[1]).startswith(b"\x89PNG\r\n"), (name, figure)

    def test_column_lineage_points_at_columns_that_exist(self, ran: Ran) -> None:
        columns = {
            name: {c.name for c in metadata(ran.full[FIRST], name)["dagster/column_schema"].value.columns}
            for name in TABLES
        }
        edges = 0
        for name in TABLES:
            lineage = metadata(ran.full[FIRST], name).get("dagster/column_lineage")
            for column, origins in lineage.value.deps_by_column.items() if lineage else ():
                assert column in columns[name], (name, column)
                for origin in origins:
                    upstream = origin.asset_key.to_user_string()
                    assert upstream in STAGES[name].needs(ran.settings), (name, column)
                    assert origin.column_name in columns[upstream], (name, column, upstream)
                    edges += 1
        assert edges > 30

    def test_every_check_carries_its_snapshot_and_passes(self, ran: Ran) -> None:
        evaluations = ran.full[SECOND].get_asset_check_evaluations()
        assert {evaluation.partition for evaluation in evaluations} == {SECOND}
        assert all(evaluation.passed for evaluation in evaluations)
        checked = {evaluation.asset_key.to_user_string() for evaluation in evaluations}
        assert checked == set(SNAPSHOT_STAGES)
        blocking = {e.check_name for e in evaluations if e.blocking}
        assert {"rows_accounted_for", "budget_met_exactly", "value_below_bound"} <= blocking
        assert {"made_under_these_settings", "kept_equals_budget", "rows_equal_kept"} <= blocking
        assert "every_shard_readable" not in blocking

    def test_snapshot_runs_leave_global_assets_alone(self, ran: Ran) -> None:
        for name in GLOBAL:
            records = ran.instance.fetch_materializations(dg.AssetKey(name), limit=10).records
            assert [record.run_id for record in records] == [ran.fit.run_id], name
            version = extract_data_version_from_entry(records[0].event_log_entry)
            assert version == dg.DataVersion(store(ran.settings).current(name).fingerprint), name


class TestAgain:
    def test_a_second_run_resumes_without_any_model(self, own_root: Settings) -> None:
        """The weights are gone: only finished work can carry the run."""
        before = {name: store(own_root).current(name, FIRST) for name in SNAPSHOT_STAGES}
        done = [path.with_suffix("").with_suffix("") for path in Path(own_root.storage.root).rglob("*.done.json")]
        files = {path: path.stat().st_mtime_ns for path in done}
        assert len(files) > 2 * len(SNAPSHOT_STAGES)
        for part, model in (("dclm", "dclm.bin"), ("wiki", "wiki.bin"), ("edu", "edu.json")):
            path = store(own_root).current(f"{part}_classifier").folder / model
            path.write_bytes(b"no model")
            del files[path]
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(own_root, instance, "full", FIRST)
        assert result.success
        for name in SNAPSHOT_STAGES:
            assert store(own_root).current(name, FIRST).fingerprint == before[name].fingerprint, name
        assert files == {path: path.stat().st_mtime_ns for path in files}

    def test_selecting_a_snapshot_twice_gives_the_same_bytes(self, ran: Ran, project: Project) -> None:
        with dg.DagsterInstance.ephemeral() as instance:
            assert execute(project.settings, instance, "full", FIRST).success
        for name in SNAPSHOT_STAGES:
            here, there = project.store.current(name, FIRST), store(ran.settings).current(name, FIRST)
            assert here.fingerprint == there.fingerprint
            for shard in here.shards:
                assert here.path(shard).read_bytes() == there.path(shard).read_bytes(), (name, shard)


class TestFailures:
    def test_a_failing_blocking_check_leaves_no_materialisation_and_stops_what_follows(
        self, own_root: Settings
    ) -> None:
        published = store(own_root).current("fineweb_mask_manifest", FIRST).fingerprint
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(own_root, instance, "full", FIRST, ops={"datamask_masks": {"config": {"lambda": 0.3}}})
            assert not result.success
            assert "datamask_masks" in materialised(result)
            assert "fineweb_mask_manifest" not in materialised(result)
            assert "fineweb_mask" not in materialised(result)
            assert not instance.fetch_materializations(dg.AssetKey("fineweb_mask_manifest"), limit=1).records
        (refused,) = [e for e in result.get_asset_check_evaluations() if not e.passed]
        assert (refused.check_name, refused.partition) == ("made_under_these_settings", FIRST)
        assert refused.blocking and refused.severity is dg.AssetCheckSeverity.ERROR
        assert "datamask_masks: select.lambda = 0.3 (in force: 0.5)" in str(refused.metadata["different"].value)
        message = failure(result, "fineweb_mask_manifest")
        assert "select.lambda = 0.3 (in force: 0.5)" in message and "\n" not in message
        assert store(own_root).current("fineweb_mask_manifest", FIRST).fingerprint == published

    def test_an_override_marks_its_output_as_an_experiment(self, own_root: Settings) -> None:
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(own_root, instance, "full", FIRST, ops={"datamask_masks": {"config": {"lambda": 0.3}}})
        assert metadata(result, "datamask_masks")["experiment"].value is True
        assert metadata(result, "datamask_masks")["lambda"].value == 0.3
        assert metadata(result, "kmeans_clusters")["experiment"].value is False

    def test_a_value_out_of_range_is_one_clear_failure_without_retry(self, own_root: Settings) -> None:
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(own_root, instance, "full", FIRST, ops={"datamask_masks": {"config": {"lambda": 1.5}}})
            message = failure(result, "datamask_masks")
            assert "select.lambda = 1.5" in message and "less than or equal to 1" in message
            assert "\n" not in message
            assert "datamask_masks" not in materialised(result)

    def test_a_misspelt_config_key_is_dagsters_own_error(self, own_root: Settings) -> None:
        with dg.DagsterInstance.ephemeral() as instance, pytest.raises(dg.DagsterInvalidConfigError) as caught:
            execute(own_root, instance, "full", FIRST, ops={"datamask_masks": {"config": {"lamda": 0.3}}})
        assert "lamda" in str(caught.value)

    def test_a_truncated_shard_fails_its_snapshot_by_name_and_permanently(
        self, tmp_path: Path, fitted_root: Path, labels: Path
    ) -> None:
        source = tmp_path / "source"
        write_shard(source, "CC-A", "000_00000", 20)
        bad = write_shard(source, "CC-A", "001_00000", 20)
        bad.write_bytes(bad.read_bytes()[:200])
        root = tmp_path / "root"
        shutil.copytree(fitted_root, root)
        settings = settings_for(source, root, labels)
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(settings, instance, "full", "CC-A")
            assert materialised(result) == set()
        message = failure(result, "raw_shards")
        assert str(bad) in message and "is not readable parquet" in message and "\n" not in message

    def test_permanent_errors_say_that_a_retry_is_useless(self, ran: Ran) -> None:
        """Dagster's events do not keep `allow_retries`, so the asset is called as Dagster calls it."""
        asset = raw_shards.build(ran.settings)
        resources = build_definitions(ran.settings).resources or {}
        with (
            dg.DagsterInstance.ephemeral() as instance,
            dg.build_asset_context(partition_key="CC-NONE", instance=instance) as context,
            pytest.raises(dg.Failure) as caught,
        ):
            config = config_class(STAGES["raw_shards"], ran.settings)()
            list(asset(context, config, **{n: resources[n] for n in ("storage", "accelerator", "models", "compute")}))
        assert caught.value.allow_retries is False
        assert "no snapshot 'CC-NONE'" in (caught.value.description or "")

    def test_an_unpublished_input_names_what_to_run(self, tmp_path: Path, small_source: Path, labels: Path) -> None:
        settings = settings_for(small_source, tmp_path / "root", labels)
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(settings, instance, "score", FIRST)
            assert materialised(result) == {"raw_shards"}
        message = failure(result, "dclm_scores")
        assert "dclm_classifier is not published" in message and "run the job fit_global first" in message

    def test_a_budget_above_what_is_left_names_both_numbers(self, own_root: Settings) -> None:
        with dg.DagsterInstance.ephemeral() as instance:
            result = execute(own_root.replace({"select.budget": "39"}), instance, "select", FIRST)
        message = failure(result, "datamask_masks")
        assert "39 of the 65 documents" in message and "left 36" in message and "lower select.budget" in message
