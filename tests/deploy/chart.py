"""What Dagster's Helm chart makes of deploy/values.yaml, as far as the values reach, by facts read off its templates.

The chart itself is on no package index, so `helm template` cannot run here. This is its reading of the keys that we
set, and nothing else: a key that it does not know (misspelt, or in the wrong place) is an error, as the chart's own
schema has it for most sections.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

RELEASE, NAMESPACE = "dagster", "datamask"
HOME = "/opt/dagster/dagster_home"
ACCOUNT = "dagster"
VALUES = Path(__file__).parents[2] / "deploy" / "values.yaml"


class Values:
    """The values, each of which has to be taken once."""

    def __init__(self, tree: Mapping[str, Any], at: str = "") -> None:
        self._tree, self._at = dict(tree), at

    @classmethod
    def read(cls, path: Path = VALUES) -> "Values":
        return cls(yaml.safe_load(path.read_text("utf-8")))

    def section(self, key: str) -> "Values":
        return Values(self._tree.pop(key), f"{self._at}{key}.")

    def take(self, key: str, default: Any = ...) -> Any:
        """A key's value. Raises KeyError where it is not set and has no default in the chart."""
        found = self._tree.pop(key, default)
        if found is ...:
            raise KeyError(f"{self._at}{key}")
        return found

    def has(self, key: str) -> bool:
        return key in self._tree

    def end(self) -> None:
        """Raises ValueError naming keys that the chart does not have here."""
        if self._tree:
            raise ValueError(f"the chart has no {', '.join(f'{self._at}{key}' for key in self._tree)}")


class Chart:
    """`instance`: dagster.yaml; `workspace`: workspace.yaml; `pods`: {component: its pod}."""

    def __init__(self, values: Values) -> None:
        self.instance: dict[str, Any] = {}
        self.workspace: dict[str, Any] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        together = values.section("global")
        self._secret = together.take("postgresqlSecretName")
        together.end()
        assert values.take("generatePostgresqlPasswordSecret") is False
        self._postgresql(values.section("postgresql"))
        self._launcher(values.section("runLauncher"))
        self._daemon(values.section("dagsterDaemon"))
        self._concurrency(values.section("concurrency"))
        self._code(values.section("dagster-user-deployments"))
        self._webserver(values.section("dagsterWebserver"))
        assert values.section("ingress").take("enabled") is False
        self.instance["telemetry"] = {"enabled": values.section("telemetry").take("enabled")}
        retention = values.section("retention")
        assert retention.take("enabled")
        sensor = retention.section("sensor")
        self.instance["retention"] = {"sensor": {"purge_after_days": sensor.take("purgeAfterDays")}}
        sensor.end()
        retention.end()
        self.instance |= values.take("additionalInstanceConfig")
        values.end()

    def _postgresql(self, values: Values) -> None:
        # the chart's own server
        assert values.take("enabled") is False
        service = values.section("service")
        config = {
            "postgres_db": {
                "username": values.take("postgresqlUsername"),
                "password": {"env": "DAGSTER_PG_PASSWORD"},
                "hostname": values.take("postgresqlHost"),
                "db_name": values.take("postgresqlDatabase"),
                "port": service.take("port"),
                "params": values.take("postgresqlParams"),
                "scheme": values.take("postgresqlScheme"),
            }
        }
        service.end()
        values.end()
        for storage, module, name in (
            ("schedule_storage", "dagster_postgres.schedule_storage", "PostgresScheduleStorage"),
            ("run_storage", "dagster_postgres.run_storage", "PostgresRunStorage"),
            ("event_log_storage", "dagster_postgres.event_log", "PostgresEventLogStorage"),
        ):
            self.instance[storage] = {"module": module, "class": name, "config": config}

    def _launcher(self, values: Values) -> None:
        assert values.take("type") == "K8sRunLauncher"
        one_of = values.section("config")
        config = one_of.section("k8sRunLauncher")
        made = {
            "load_incluster_config": config.take("loadInclusterConfig"),
            "job_namespace": NAMESPACE,
            "image_pull_policy": config.take("imagePullPolicy"),
            "service_account_name": ACCOUNT,
            "dagster_home": HOME,
            "instance_config_map": f"{RELEASE}-instance",
            "postgres_password_secret": self._secret,
            "env_config_maps": [f"{RELEASE}-pipeline-env"],
            "env_secrets": [secret["name"] for secret in config.take("envSecrets")],
            "volumes": config.take("volumes"),
            "volume_mounts": config.take("volumeMounts"),
            "resources": config.take("resources"),
            "security_context": config.take("securityContext"),
            "fail_pod_on_run_failure": config.take("failPodOnRunFailure"),
        }
        run = config.section("runK8sConfig")
        made["run_k8s_config"] = {
            snake: run.take(key)
            for key, snake in (
                ("containerConfig", "container_config"),
                ("podSpecConfig", "pod_spec_config"),
                ("podTemplateSpecMetadata", "pod_template_spec_metadata"),
                ("jobSpecConfig", "job_spec_config"),
                ("jobMetadata", "job_metadata"),
            )
            if run.has(key)
        }
        for section in (run, config, one_of, values):
            section.end()
        self.instance["run_launcher"] = {"module": "dagster_k8s", "class": "K8sRunLauncher", "config": made}

    def _daemon(self, values: Values) -> None:
        self.instance["run_coordinator"] = {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}
        monitoring = values.section("runMonitoring")
        self.instance["run_monitoring"] = {
            "enabled": monitoring.take("enabled"),
            "start_timeout_seconds": monitoring.take("startTimeoutSeconds"),
            "max_resume_run_attempts": monitoring.take("maxResumeRunAttempts"),
            "poll_interval_seconds": monitoring.take("pollIntervalSeconds"),
            "free_slots_after_run_end_seconds": monitoring.take("freeSlotsAfterRunEndSeconds"),
        }
        retries = values.section("runRetries")
        self.instance["run_retries"] = {
            "enabled": retries.take("enabled"),
            "max_retries": retries.take("maxRetries"),
            "retry_on_asset_or_op_failure": retries.take("retryOnAssetOrOpFailure"),
        }
        sensors, backfills = values.section("sensors"), values.section("backfills")
        self.instance["sensors"] = {
            "use_threads": sensors.take("useThreads"),
            "num_workers": sensors.take("numWorkers"),
        }
        self.instance["backfills"] = {
            "use_threads": backfills.take("useThreads"),
            "num_workers": backfills.take("numWorkers"),
            "num_submit_workers": backfills.take("numSubmitWorkers"),
        }
        for section in (monitoring, retries, sensors, backfills):
            section.end()
        self.pods["daemon"] = self._pod(values, "dagster-daemon", ["dagster-daemon", "run"])
        values.end()

    def _concurrency(self, values: Values) -> None:
        assert values.take("enabled")
        pools, runs = values.section("pools"), values.section("runs")
        self.instance["concurrency"] = {
            "pools": {"granularity": pools.take("granularity"), "default_limit": pools.take("defaultLimit")},
            "runs": {
                "max_concurrent_runs": runs.take("maxConcurrentRuns"),
                "tag_concurrency_limits": runs.take("tagConcurrencyLimits"),
            },
        }
        for section in (pools, runs, values):
            section.end()

    def _code(self, values: Values) -> None:
        assert values.take("enabled") and values.take("enableSubchart")
        (deployment,) = (Values(one, "dagster-user-deployments.deployments[].") for one in values.take("deployments"))
        self.code_host, self.code_port = deployment.take("name"), deployment.take("port")
        included = deployment.section("includeConfigInLaunchedRuns")
        assert included.take("enabled") is False, "runs would take the code server's resources"
        included.end()
        command = ["dagster", "api", "grpc", "-h", "0.0.0.0", "-p", str(self.code_port)]
        # not a field of a probe
        probe = dict(deployment.take("readinessProbe"))
        assert probe.pop("enabled")
        probe["exec"] = {"command": ["dagster", "api", "grpc-health-check", "-p", str(self.code_port)]}
        command += deployment.take("dagsterApiGrpcArgs")
        self.pods["code"] = self._pod(deployment, "user-deployments", command, probe)
        deployment.end()
        values.end()

    def _webserver(self, values: Values) -> None:
        assert values.take("replicaCount") >= 1
        service, workspace = values.section("service"), values.section("workspace")
        self.service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{RELEASE}-dagster-webserver"},
            "spec": {
                "type": service.take("type"),
                "ports": [{"port": (port := service.take("port")), "targetPort": "http", "name": "http"}],
                "selector": {"component": "dagster-webserver"},
            },
        }
        assert workspace.take("enabled")
        self.workspace = {
            "load_from": [
                {"grpc_server": {"host": one["host"], "port": one["port"], "location_name": one["name"]}}
                for one in workspace.take("servers")
            ]
        }
        self.read_only = values.take("enableReadOnly")
        command = ["/bin/bash", "-c", f"dagster-webserver -h 0.0.0.0 -p {port} -w /dagster-workspace/workspace.yaml"]
        self.pods["webserver"] = self._pod(values, "dagster-webserver", command, values.take("readinessProbe"))
        self.pods["webserver"]["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": port}]
        for section in (service, workspace, values):
            section.end()

    def _pod(
        self, values: Values, component: str, command: list[str], probe: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        image = values.section("image")
        container = {
            "name": "dagster",
            "image": f"{image.take('repository')}:{image.take('tag')}",
            "imagePullPolicy": image.take("pullPolicy"),
            "command": command,
            "env": [
                {
                    "name": "DAGSTER_PG_PASSWORD",
                    "valueFrom": {"secretKeyRef": {"name": self._secret, "key": "postgresql-password"}},
                }
            ],
            "envFrom": [{"secretRef": secret} for secret in values.take("envSecrets", [])],
            "securityContext": values.take("securityContext"),
            "resources": values.take("resources"),
            "volumeMounts": values.take("volumeMounts", []),
        }
        image.end()
        if probe is not None:
            container["readinessProbe"] = probe
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": component, "labels": {"component": component}},
            "spec": {
                "serviceAccountName": ACCOUNT,
                "securityContext": values.take("podSecurityContext"),
                "containers": [container],
                "volumes": values.take("volumes", []),
            },
        }
