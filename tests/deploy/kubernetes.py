"""A Kubernetes on loopback, as far as Dagster talks to one: its jobs, whose pods are processes of this machine, and the
clusters of KubeRay, each a Ray head.

What arrives over HTTP is checked, unknown fields included, against Kubernetes' own schema; then the container's command
runs here with the container's environment. Images, volumes, nodes and secrets are not.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port

validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra dev")
# the oldest that is still supported by somebody and the newest that the schemas are there for
VERSIONS = ("1.30", "1.37")
# Ray's command, but for how long a node may take to start, which is 30 s: on a busy machine it takes longer
_RAY = """
import sys, time, types
from ray._private import node
node.time = types.SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: time.monotonic() / 20)
from ray.scripts.scripts import main
sys.exit(main())
"""


def check(*manifests: Mapping[str, Any]) -> None:
    """Fail for a manifest with an unknown field or a value of the wrong type."""
    for manifest in manifests:
        for version in VERSIONS:
            validator.validate(dict(manifest), version, strict=True)


class Cluster:
    """`jobs` and `rays` are the manifests in the order in which they came, `deleted` the names of what was deleted;
    `kubeconfig` is the file to reach it with.

    ray_client: the port at which Ray's head lets clients in.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], *, runs: bool, ray_client: int = 0) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.rays: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self._ray_folders = contextlib.ExitStack()
        self._ray_client = ray_client
        self._folder, self._environment, self._runs = folder, dict(environment), runs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    make = cluster._bring_up if self.path.endswith("/rayclusters") else cluster._create
                    self._answer(201, make(json.loads(body)))
                except Exception as error:
                    # its text reaches the test through Dagster's own error
                    self._answer(422, {"kind": "Status", "status": "Failure", "message": str(error)})

            def do_GET(self) -> None:
                parts = self.path.partition("?")[0].split("/")
                if "jobs" in parts or "rayclusters" in parts:
                    kind = "jobs" if "jobs" in parts else "rayclusters"
                    status = cluster._status if kind == "jobs" else cluster._state
                    found = status(parts[parts.index(kind) + 1])
                    self._answer(200, found) if found else self._answer(404, {"kind": "Status", "code": 404})
                else:
                    self._answer(200, {"kind": "PodList", "apiVersion": "v1", "items": []})

            def do_DELETE(self) -> None:
                cluster._end(self.path.partition("?")[0].rpartition("/")[2])
                self._answer(200, {"kind": "Status", "status": "Success"})

            def _answer(self, status: int, body: Mapping[str, Any]) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.kubeconfig = folder / "kubeconfig.yaml"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [
                        {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
                    ],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "test"}}],
                    "users": [{"name": "test", "user": {}}],
                }
            )
        )

    def _create(self, job: dict[str, Any]) -> dict[str, Any]:
        check(job)
        self.jobs.append(job)
        name, (container,) = job["metadata"]["name"], job["spec"]["template"]["spec"]["containers"]
        if self._runs:
            written = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
            with (self._folder / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    container.get("command", []) + container["args"],
                    # what the image and the mounted files are in a cluster, the test's environment is here
                    env={**os.environ, **written, **self._environment},
                    cwd=self._folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return job

    def _status(self, name: str) -> dict[str, Any] | None:
        process = self._processes.get(name)
        if process is None:
            return None
        ended = process.poll()
        status = {"active": 1} if ended is None else {"failed" if ended else "succeeded": 1}
        job = next(job for job in self.jobs if job["metadata"]["name"] == name)
        return {**job, "status": status}

    def _bring_up(self, ray: dict[str, Any]) -> dict[str, Any]:
        """A cluster's head, with two cores in the place of the workers that it would have."""
        for group in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
            check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, **group["template"]})
        self.rays.append(ray)
        self._start_head(ray["metadata"]["name"])
        return ray

    def _start_head(self, name: str) -> None:
        command = [sys.executable, "-c", _RAY, "start", "--head", "--block", "--port=0", "--num-cpus=2"]
        command += ["--include-dashboard=false"]
        command += ["--node-ip-address=127.0.0.1", f"--ray-client-server-port={self._ray_client}"]
        # beside other Rays of this machine; sockets lie below the folder, and a socket's path is short
        folder = self._ray_folders.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        command += [f"--dashboard-agent-listen-port={free_port()}", f"--temp-dir={folder}"]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env={**os.environ, **self._environment}, stdout=log, stderr=subprocess.STDOUT
            )

    def _state(self, name: str) -> dict[str, Any] | None:
        process = self._processes.get(name)
        if process is None:
            return None
        if process.poll() is not None:
            # as KubeRay does with a head's pod
            self._start_head(name)
        with socket.socket() as probe:
            ready = probe.connect_ex(("127.0.0.1", self._ray_client)) == 0
        head = {"serviceIP": "127.0.0.1", "serviceName": f"{name}-head-svc"}
        status = {"state": "ready", "endpoints": {"dashboard": "8265"}, "head": head} if ready else {"state": "pending"}
        return {"metadata": {"name": name}, "status": status}

    def _end(self, name: str) -> None:
        self.deleted.append(name)
        # Ray ends what it started when it is asked to
        self._processes[name].terminate()
        self._processes.pop(name).wait(300)

    def pod_of(self, label: str, value: str) -> dict[str, Any]:
        """The pod of the one job whose pods have a label."""
        (found,) = (
            job["spec"]["template"]
            for job in self.jobs
            if job["spec"]["template"]["metadata"]["labels"].get(label) == value
        )
        return dict(found)

    def wait(self, seconds: float) -> None:
        """Wait for the first job's process to end: it waits for all others."""
        self._processes[self.jobs[0]["metadata"]["name"]].wait(seconds)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))

    @contextlib.contextmanager
    def running(self) -> Iterator["Cluster"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            for name, process in self._processes.items():
                if name in {ray["metadata"]["name"] for ray in self.rays}:
                    process.terminate()
                    process.wait(300)
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(300)
            self._ray_folders.close()


def with_venv() -> str:
    """$PATH with this Python's programs first, as the image has it."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"
