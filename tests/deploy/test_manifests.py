"""What else stands in deploy/: valid, and of one mind with the values beside it."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dagster_datamask.settings import Settings, load_settings
from dagster_datamask.stages.base import STAGES
from tests.audit import EXTRAS, LOCK, locked
from tests.deploy.chart import Chart, Values
from tests.deploy.kubernetes import check

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


def snake(camel: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", camel).lower()


def config(name: str = "oauth2-proxy.cfg") -> dict[str, Any]:
    return tomllib.loads((DEPLOY / name).read_text("utf-8"))


@pytest.fixture
def chart() -> Chart:
    return Chart(Values.read())


@pytest.fixture
def settings() -> Settings:
    return load_settings(str(DEPLOY / "datamask.toml"), env={})


class TestRayCluster:
    @pytest.fixture
    def spec(self) -> dict[str, Any]:
        (cluster,) = manifests("raycluster.yaml")
        assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
        return dict(cluster["spec"])

    def groups(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]

    def container(self, group: dict[str, Any]) -> dict[str, Any]:
        (container,) = group["template"]["spec"]["containers"]
        return dict(container)

    def test_kuberay_knows_every_field(self, spec: dict[str, Any]) -> None:
        kuberay = pytest.importorskip("dagster_ray.kuberay.configs", reason="needs the extra ray")
        assert {snake(key) for key in spec} <= set(kuberay.RayClusterSpec.model_fields)
        # its own rules of tokens and versions are checked as it is made
        kuberay.RayClusterSpec(**{snake(key): value for key, value in spec.items() if key != "authOptions"})
        kuberay.RayClusterSpec(
            ray_version=spec["rayVersion"], auth_options={snake(k): v for k, v in spec["authOptions"].items()}
        )
        known = {"template", "rayStartParams", "serviceType", "groupName", "replicas", "minReplicas", "maxReplicas"}
        assert {key for group in self.groups(spec) for key in group} == known

    def test_kubernetes_knows_every_pod(self, spec: dict[str, Any]) -> None:
        for group in self.groups(spec):
            check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, **group["template"]})

    def test_one_image_and_one_version(self, spec: dict[str, Any], chart: Chart) -> None:
        images = {self.container(group)["image"] for group in self.groups(spec)}
        assert images == {chart.pods["code"]["spec"]["containers"][0]["image"]}
        ray = pytest.importorskip("ray", reason="needs the extra ray")
        assert spec["rayVersion"] == ray.__version__

    def test_nothing_runs_on_the_head_or_as_root(self, spec: dict[str, Any]) -> None:
        assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        assert "nvidia.com/gpu" not in self.container(spec["headGroupSpec"])["resources"]["limits"]
        for group in self.groups(spec):
            assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
            assert self.container(group)["securityContext"]["allowPrivilegeEscalation"] is False

    def test_runs_hold_the_token_that_it_asks_for(self, spec: dict[str, Any], chart: Chart) -> None:
        run = chart.instance["run_launcher"]["config"]["run_k8s_config"]["container_config"]
        (token,) = [entry for entry in run["env"] if entry["name"] == "RAY_AUTH_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"]["name"] == spec["authOptions"]["secretName"]
        assert spec["authOptions"]["mode"] == "token"

    def test_the_address_is_its_service(self, settings: Settings) -> None:
        (cluster,) = manifests("raycluster.yaml")
        assert settings.compute.ray_address == f"ray://{cluster['metadata']['name']}-head-svc:10001"

    def test_what_a_stage_asks_for_fits_a_node(self, spec: dict[str, Any], settings: Settings) -> None:
        rooms = []
        for group in spec["workerGroupSpecs"]:
            resources = self.container(group)["resources"]
            gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
            memory = int(resources["limits"]["memory"].removesuffix("Gi")) * 2**30 / 1e9
            # Ray gives its object store a part of a node's memory, and workers the rest
            rooms.append((int(resources["requests"]["cpu"]), gpus, 0.6 * memory))
        assert settings.compute.requests
        for name, asked in settings.compute.requests.items():
            gpus = asked.gpus if asked.gpus is not None else float(STAGES[name].on_accelerator)
            needs = (asked.cpus or settings.compute.threads, gpus, asked.memory_gb or 0)
            assert any(all(n <= room for n, room in zip(needs, rooms_, strict=True)) for rooms_ in rooms), name


class TestSettings:
    def test_of_the_cluster_are_read(self, settings: Settings, chart: Chart) -> None:
        assert settings.compute.backend == "ray"
        assert set(settings.compute.requests) <= set(STAGES)
        mounted = {mount["mountPath"] for mount in chart.instance["run_launcher"]["config"]["volume_mounts"]}
        assert any(settings.storage.cache.startswith(f"{path}/") for path in mounted)

    def test_the_image_looks_where_the_file_is_mounted(self, chart: Chart) -> None:
        named = re.search(r"DATAMASK_CONFIG=(\S+)", (DEPLOY / "Dockerfile").read_text())
        assert named is not None
        for mounts in (
            chart.instance["run_launcher"]["config"]["volume_mounts"],
            chart.pods["code"]["spec"]["containers"][0]["volumeMounts"],
        ):
            assert str(Path(named[1]).parent) in {mount["mountPath"] for mount in mounts}


class TestAuthentication:
    def test_kubernetes_knows_every_manifest(self) -> None:
        found = manifests("oauth2-proxy.yaml")
        assert [one["kind"] for one in found] == ["Deployment", "Service", "NetworkPolicy", "NetworkPolicy"]
        check(*found)

    def test_the_ui_is_on_loopback_and_no_secret_is_written_down(self) -> None:
        written = config()
        assert written["upstreams"] == ["http://127.0.0.1:3000/"]
        assert written["http_address"].startswith("127.0.0.1:")
        assert written["cookie_secure"] is True and written["allowed_groups"]
        assert not {"client_secret", "cookie_secret"} & set(written)
        # what would let somebody past
        assert not [key for key in written if key.startswith(("skip_auth", "trusted_ip"))]

    def test_arguments_are_options_of_the_file(self) -> None:
        deployment = manifests("oauth2-proxy.yaml")[0]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        names = {arg.removeprefix("--").partition("=")[0].replace("-", "_") for arg in container["args"]}
        # what may be given more than once has a plural in the file
        singular = {key.removesuffix("s") if isinstance(value, list) else key for key, value in config().items()}
        assert names - {"config"} <= singular

    def test_the_proxy_alone_reaches_the_webserver(self, chart: Chart) -> None:
        deployment, _, webserver, code = manifests("oauth2-proxy.yaml")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        (port,) = chart.service["spec"]["ports"]
        upstream = f"--upstream=http://{chart.service['metadata']['name']}:{port['port']}/"
        assert upstream in container["args"]
        labels = {name: pod["metadata"]["labels"]["component"] for name, pod in chart.pods.items()}
        assert webserver["spec"]["podSelector"]["matchLabels"]["component"] == labels["webserver"]
        (rule,) = webserver["spec"]["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": deployment["spec"]["selector"]["matchLabels"]}}]
        assert rule["ports"] == [{"port": port["port"]}]
        assert code["spec"]["podSelector"]["matchLabels"]["component"] == labels["code"]
        (rule,) = code["spec"]["ingress"]
        (callers,) = rule["from"][0]["podSelector"]["matchExpressions"]
        assert set(callers["values"]) == {labels["webserver"], labels["daemon"]}
        assert rule["ports"] == [{"port": chart.code_port}]


class TestImage:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")

    def test_hadolint_finds_nothing(self) -> None:
        program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
        if program is None:
            pytest.skip("needs hadolint")
        done = subprocess.run([program, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")

    def test_what_is_copied_is_there(self) -> None:
        copied = [
            name
            for names in re.findall(r"^COPY ((?:[^-\s]\S* )+)\S+$", self.text, re.MULTILINE)
            for name in names.split()
        ]
        assert {"requirements.lock", "pyproject.toml", "dagster_datamask"} <= set(copied)
        assert all((REPO / name).exists() for name in copied)
        allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
        assert {name[1:] for name in allowed if name.startswith("!")} == set(copied)

    def test_all_that_is_installed_has_its_hash(self) -> None:
        installs = [line.strip() for line in re.findall(r"pip install([^&\n]*)", self.text)]
        assert installs == ["--require-hashes -r requirements.lock", "--no-deps --no-build-isolation ."]
        page = (REPO / "docs" / "security.md").read_text("utf-8")
        assert all(f"\npip install {line}\n" in page for line in installs)

    def test_the_lock_has_all_that_the_image_s_extras_need(self) -> None:
        """As pip finds it out: whatever a locked package asks for here has to be locked, extras of extras included."""
        pins = locked(LOCK.read_text("utf-8"))
        build = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
        waiting = [Requirement(line) for line in build["build-system"]["requires"]]
        waiting += [Requirement(line) for line in build["project"]["dependencies"]]
        waiting += [Requirement(line) for name in EXTRAS for line in build["project"]["optional-dependencies"][name]]
        seen: set[tuple[str, frozenset[str]]] = set()
        while waiting:
            requirement = waiting.pop()
            name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
            if (name, extras) in seen:
                continue
            seen.add((name, extras))
            assert name in pins and pins[name][0] in requirement.specifier, f"{requirement}: not locked; make lock"
            try:
                asked = [Requirement(line) for line in metadata.requires(name) or ()]
            except metadata.PackageNotFoundError:
                # of an extra that is not installed here: what it needs is seen by who has it
                continue
            for one in asked:
                if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                    waiting.append(one)
        assert len(seen) > 100

    def test_its_user_is_the_pods(self, chart: Chart) -> None:
        (user,) = re.findall(r"^USER (\d+)$", self.text, re.MULTILINE)
        (cluster,) = manifests("raycluster.yaml")
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        pods = [*(pod["spec"] for pod in chart.pods.values()), *(group["template"]["spec"] for group in groups)]
        assert {pod["securityContext"]["runAsUser"] for pod in pods} == {int(user)}
        assert f"--uid {user} " in self.text and int(user) > 0
