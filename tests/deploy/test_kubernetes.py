"""deploy/values.yaml: valid, of one mind with deploy/dagster.yaml, and run: on PostgreSQL, its pods as processes."""

import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
import yaml
from dagster._config import validate_config
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.instance.config import dagster_instance_config_schema
from dagster._core.launcher import LaunchRunContext
from dagster._core.origin import DEFAULT_DAGSTER_ENTRY_POINT, JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.workspace.context import BaseWorkspaceRequestContext
from dagster._daemon.monitoring.run_monitoring import monitor_started_run

from dagster_datamask import running
from dagster_datamask.definitions import build_definitions
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.resources import pods
from dagster_datamask.settings import Settings, SettingsError, load_settings
from dagster_datamask.stages.base import STAGES
from tests.conftest import SNAPSHOTS
from tests.deploy.chart import HOME, Chart, Values
from tests.deploy.conftest import Postgres
from tests.deploy.kubernetes import Cluster, check, with_venv
from tests.project import Project
from tests.test_cli import write_config

REPO = Path(__file__).parents[2]
dagster_k8s = pytest.importorskip("dagster_k8s", reason="needs the extra k8s")


@pytest.fixture
def chart() -> Chart:
    return Chart(Values.read())


class TestValues:
    def test_the_chart_knows_every_key(self, chart: Chart) -> None:
        assert set(chart.pods) == {"webserver", "daemon", "code"}

    def test_a_key_in_the_wrong_place_is_noticed(self) -> None:
        tree = yaml.safe_load((REPO / "deploy" / "values.yaml").read_text())
        tree["dagsterDaemon"]["replicaCount"] = 2
        with pytest.raises(ValueError, match=r"the chart has no dagsterDaemon\.replicaCount"):
            Chart(Values(tree))

    def test_kubernetes_knows_every_pod_and_the_service(self, chart: Chart) -> None:
        check(chart.service, *chart.pods.values())

    def test_dagster_reads_the_instance(self, chart: Chart) -> None:
        result = validate_config(dagster_instance_config_schema(), chart.instance)
        assert result.success, [error.message for error in result.errors or ()]
        launcher = chart.instance["run_launcher"]["config"]
        result = validate_config(dagster_k8s.K8sRunLauncher.config_type(), launcher)
        assert result.success, [error.message for error in result.errors or ()]

    def test_it_says_what_the_dagster_yaml_beside_it_says(self, chart: Chart) -> None:
        beside: dict[str, Any] = yaml.safe_load((REPO / "deploy" / "dagster.yaml").read_text())
        database = beside.pop("storage")["postgres"]["postgres_db"]
        here = chart.instance["run_storage"]["config"]["postgres_db"]
        assert set(here) - {"params"} == set(database) and here["scheme"] == database["scheme"]
        # no code server is started by Dagster there
        beside.pop("code_servers")
        # a node has to come up first, and a lost pod's run is started anew, not resumed
        monitoring = beside["run_monitoring"] | {"start_timeout_seconds": 1800, "max_resume_run_attempts": 0}
        purged = beside["retention"]["sensor"]["purge_after_days"] | {"failure": -1, "started": -1}
        changed = {
            "run_monitoring": monitoring,
            "retention": {"sensor": {"purge_after_days": purged}},
        }
        of_kubernetes = {"run_coordinator", "run_launcher", *(k for k in chart.instance if k.endswith("_storage"))}
        assert {k: v for k, v in chart.instance.items() if k not in of_kubernetes} == beside | changed

    def test_the_location_keeps_its_name_and_is_reached(self, chart: Chart) -> None:
        (location,) = chart.workspace["load_from"]
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["dagster"]
        assert location["grpc_server"] == {
            "host": chart.code_host,
            "port": chart.code_port,
            "location_name": project["code_location_name"],
        }
        command = chart.pods["code"]["spec"]["containers"][0]["command"]
        assert command[-2:] == ["-m", project["module_name"]]

    def test_nothing_is_reached_from_outside_and_nothing_runs_as_root(self, chart: Chart) -> None:
        assert chart.service["spec"]["type"] == "ClusterIP"
        for pod in chart.pods.values():
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            (container,) = pod["spec"]["containers"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert all(port["containerPort"] >= 1024 for port in container.get("ports", ()))

    def test_one_image_and_no_credential(self, chart: Chart) -> None:
        version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
        images = {pod["spec"]["containers"][0]["image"] for pod in chart.pods.values()}
        assert {image.rpartition(":")[2] for image in images} == {version} and len(images) == 1
        text = (REPO / "deploy" / "values.yaml").read_text().lower()
        assert not any(word in text for word in ("postgresqlpassword:", "aws_", "hf_token", "secret_key"))


def settings_of(*overrides: str) -> Settings:
    return load_settings(os.devnull, ["profile=demo", *overrides], env={})


_E5 = "compute.requests={e5_embeddings = {cpus = 8, gpus = 0.5, memory_gb = 32}, edu_scores = {memory_gb = 0.25}}"


class TestOpTags:
    def test_of_what_is_asked_for(self) -> None:
        settings = settings_of("compute.executor=k8s_job", _E5, 'compute.gpu_nodes={pool = "h200"}')
        assert pods.op_tags(STAGES["e5_embeddings"], settings) == {
            "dagster-k8s/config": {
                "container_config": {
                    "resources": {
                        "requests": {"cpu": "8", "memory": "32000M"},
                        "limits": {"memory": "32000M", "nvidia.com/gpu": "1"},
                    }
                },
                "pod_spec_config": {
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                    "node_selector": {"pool": "h200"},
                },
            }
        }
        # it computes on an accelerator, so that one is meant where nothing else is said
        (of_edu,) = (pods.op_tags(STAGES["edu_scores"], settings) or {}).values()
        assert of_edu["container_config"]["resources"] == {
            "requests": {"memory": "250M"},
            "limits": {"memory": "250M", "nvidia.com/gpu": "1"},
        }

    def test_none_of_what_is_not(self) -> None:
        settings = settings_of("compute.executor=k8s_job", _E5)
        assets = build_definitions(settings).resolve_asset_graph().assets_defs
        tagged = {asset.key.to_user_string() for asset in assets if pods.CONFIG in asset.op.tags}
        assert tagged == {"e5_embeddings", "edu_scores"}

    @pytest.mark.parametrize(
        "overrides", [(), ("compute.executor=k8s_job", "compute.backend=ray")], ids=["here", "ray"]
    )
    def test_none_where_no_pod_computes(self, overrides: tuple[str, ...]) -> None:
        settings = settings_of(_E5, *overrides)
        assert all(pods.op_tags(stage, settings) is None for stage in STAGES.values())

    def test_a_stage_on_cores_alone_takes_no_gpu(self) -> None:
        settings = settings_of("compute.executor=k8s_job", "compute.requests={dclm_scores = {cpus = 0.5}}")
        assert pods.op_tags(STAGES["dclm_scores"], settings) == {
            "dagster-k8s/config": {"container_config": {"resources": {"requests": {"cpu": "0.5"}, "limits": {}}}}
        }

    def test_versions_do_not_hang_on_where_it_runs(self) -> None:
        plain, asked = (
            build_definitions(settings_of(*overrides)).resolve_asset_graph()
            for overrides in ((), ("compute.executor=k8s_job", _E5))
        )
        keys = plain.get_all_asset_keys()
        assert {k: plain.get(k).code_version for k in keys} == {k: asked.get(k).code_version for k in keys}


def test_the_executor_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_definitions(settings_of()).executor is dg.in_process_executor
    asked = settings_of("compute.executor=k8s_job")
    assert build_definitions(asked).executor is dagster_k8s.k8s_job_executor
    monkeypatch.setitem(sys.modules, "dagster_k8s", None)
    with pytest.raises(ValueError, match=r"needs dagster-k8s: pip install 'dagster-datamask\[k8s\]'"):
        build_definitions(asked)


class Deployment:
    """The chart's instance on a PostgreSQL and a Kubernetes of this machine."""

    def __init__(self, chart: Chart, postgres: Postgres, folder: Path, settings: Settings, *, runs: bool) -> None:
        self.settings, self._folder = settings, folder
        self.cluster = Cluster(
            folder,
            {
                "PATH": with_venv(),
                "DAGSTER_HOME": str(folder),
                "DATAMASK_CONFIG": str(write_config(settings, folder / "datamask.toml")),
                "DAGSTER_PG_PASSWORD": "",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
            runs=runs,
        )
        instance = yaml.safe_load(yaml.safe_dump(chart.instance, default_flow_style=False))
        for storage in ("run_storage", "event_log_storage", "schedule_storage"):
            instance[storage]["config"]["postgres_db"] |= {
                "hostname": "127.0.0.1",
                "port": int(postgres.environment["DAGSTER_PG_PORT"]),
                "username": postgres.environment["DAGSTER_PG_USER"],
                "db_name": postgres.environment["DAGSTER_PG_DB"],
                "params": {},
            }
        instance["run_launcher"]["config"] |= {
            "load_incluster_config": False,
            "kubeconfig_file": str(self.cluster.kubeconfig),
        }
        (folder / "dagster.yaml").write_text(yaml.safe_dump(instance))

    def launch(self, instance: dg.DagsterInstance, snapshot: str, *assets: str) -> str:
        """The id of a run of these assets, as the daemon hands it to the launcher."""
        image = Chart(Values.read()).pods["code"]["spec"]["containers"][0]["image"]
        instance.add_dynamic_partitions(cc_snapshot.name or "", [snapshot])
        job = build_definitions(self.settings).resolve_implicit_global_asset_job_def()
        keys = frozenset(map(dg.AssetKey, assets))
        job = job.get_subset(asset_selection=keys)
        run = instance.create_run_for_job(
            job_def=job,
            asset_selection=keys,
            tags={"dagster/partition": snapshot},
            job_code_origin=JobPythonOrigin(
                job.name,
                RepositoryPythonOrigin(
                    sys.executable,
                    ModuleCodePointer("dagster_datamask.definitions", "defs"),
                    container_image=image,
                    entry_point=DEFAULT_DAGSTER_ENTRY_POINT,
                    container_context={},
                ),
            ),
        )
        instance.run_launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
        return run.run_id


def test_a_run_is_a_pod_with_its_own_resources(
    chart: Chart, postgres: Postgres, tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_PG_PASSWORD", "")
    monkeypatch.setenv("DAGSTER_K8S_PG_PASSWORD_SECRET", "unused")
    folder = tmp_path / "home"
    folder.mkdir()
    deployment = Deployment(chart, postgres, folder, project.settings, runs=False)
    with deployment.cluster.running() as cluster, dg.DagsterInstance.from_config(str(folder)) as instance:
        run = deployment.launch(instance, SNAPSHOTS[0], "raw_shards")
        pod = cluster.pod_of("dagster/run-id", run)["spec"]
    (container,) = pod["containers"]
    assert container["image"] == chart.pods["code"]["spec"]["containers"][0]["image"]
    # not the code server's
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["terminationGracePeriodSeconds"] == 60
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    sources = [source for source in container["envFrom"] if "secretRef" in source]
    assert sources == [{"secretRef": {"name": "datamask-secrets"}}]
    password = next(entry for entry in container["env"] if entry["name"] == "DAGSTER_PG_PASSWORD")
    assert password["valueFrom"]["secretKeyRef"] == {"name": "dagster-postgresql-secret", "key": "postgresql-password"}
    assert {"/etc/datamask", "/cache"} == {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {entry["name"]: entry.get("value") for entry in container["env"]}["DAGSTER_HOME"] == HOME


def test_the_command_is_refused_where_its_runs_would_be_taken_for_lost(
    chart: Chart, postgres: Postgres, tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_PG_PASSWORD", "")
    folder = tmp_path / "home"
    folder.mkdir()
    deployment = Deployment(chart, postgres, folder, project.settings, runs=False)
    job = build_definitions(project.settings).resolve_job_def("report")
    with deployment.cluster.running(), dg.DagsterInstance.from_config(str(folder)) as instance:
        with pytest.raises(SettingsError, match=r"started by K8sRunLauncher, .* set DAGSTER_HOME to a folder"):
            running.report_all(project.settings, instance)
        assert not instance.get_runs()
        # what the daemon makes of a run that works, but in no pod
        run_id = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED).run_id
        (record,) = instance.get_run_records()
        monitor_started_run(instance, cast(BaseWorkspaceRequestContext, None), record, logging.getLogger())
        run = instance.get_run_by_id(run_id)
        assert run is not None and run.is_failure


@pytest.mark.e2e
def test_every_step_is_a_pod_that_asks_for_what_its_stage_takes(
    chart: Chart, postgres: Postgres, tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod and its steps' are processes here, which share the database, the root and the source alone."""
    monkeypatch.setenv("DAGSTER_PG_PASSWORD", "")
    folder = tmp_path / "home"
    folder.mkdir()
    asked = settings_of(_E5).compute.requests
    changed = project.with_settings(**{"compute.executor": "k8s_job", "compute.requests": asked})
    deployment = Deployment(chart, postgres, folder, changed.settings, runs=True)
    assets = ("raw_shards", "dclm_scores", "edu_scores")
    with deployment.cluster.running() as cluster, dg.DagsterInstance.from_config(str(folder)) as instance:
        run_id = deployment.launch(instance, SNAPSHOTS[0], *assets)
        cluster.wait(600)
        run = instance.get_run_by_id(run_id)
        told = [entry.user_message for entry in instance.all_logs(run_id)]
        assert run is not None and run.is_success, f"{told}\n{cluster.logs()}"
        assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 0
        pods_of = {name: cluster.pod_of("dagster/op", name)["spec"] for name in assets}
    assert len(cluster.jobs) == 1 + len(assets)
    taken = {name: pod["containers"][0]["resources"] for name, pod in pods_of.items()}
    # what nothing is asked for takes what a run takes
    assert taken["raw_shards"] == taken["dclm_scores"] == chart.instance["run_launcher"]["config"]["resources"]
    assert taken["edu_scores"]["limits"] == {"memory": "250M", "nvidia.com/gpu": "1"}
    assert pods_of["edu_scores"]["tolerations"] and not pods_of["raw_shards"].get("tolerations")
    for name in assets:
        assert changed.store.current(name, SNAPSHOTS[0]).rows == 65
