"""A real S3 server (moto's) on loopback, started by the test, that counts what it is asked and fails when told to.

The fixture `s3` is the server with an empty bucket, `AWS_*` pointing at it. What is uploaded, listed and read goes
through the real client (s3fs).
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

boto = pytest.importorskip("botocore", reason="object stores need the extra: pip install 'dagster-datamask[s3]'")
moto = pytest.importorskip("moto.server", reason="the S3 server of these tests needs moto[server]")

import fsspec  # noqa: E402
import s3fs  # noqa: E402
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: E402
from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: E402

KEY, SECRET = "AKIALOOPBACKTESTKEY0", "marker-secret-of-the-loopback-store"
_BUCKET = "bucket"
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your rate</Message></Error>"


class S3Server:
    """`url` of an empty bucket; `requests` by kind ("LIST", "HEAD", "GET", "PUT", …) and `sent`, bytes of objects."""

    def __init__(self, where: str) -> None:
        self.endpoint = where
        self.url = f"s3://{_BUCKET}"
        self.requests: Counter[str] = Counter()
        self.sent = 0
        # told of each request's kind and path; a status it returns is the answer
        self.fault: Callable[[str, str], int | None] = lambda kind, path: None

    def reset(self) -> None:
        """Count from here, and fail no more."""
        self.requests.clear()
        self.sent = 0
        self.fault = lambda kind, path: None

    def client(self) -> s3fs.S3FileSystem:
        """A client of its own, which holds no listing."""
        return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def upload(self, folder: Path, to: str = "") -> str:
        """Put a folder's files into the bucket; the URL they lie under."""
        client = self.client()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                client.pipe_file(
                    "/".join(filter(None, (_BUCKET, to, path.relative_to(folder).as_posix()))), path.read_bytes()
                )
        return "/".join(filter(None, (self.url, to)))


class _Counted:
    """The server's application behind a count of requests and bytes, and the faults that a test asks for."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()
        self.server: S3Server | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        server, path = self.server, environ["PATH_INFO"]
        if server is None or path.startswith("/moto-api"):
            return self._application(environ, start_response)
        listed = environ["REQUEST_METHOD"] == "GET" and "list-type=" in environ["QUERY_STRING"]
        kind = "LIST" if listed else environ["REQUEST_METHOD"]
        with self._lock:
            server.requests[kind] += 1
            status = server.fault(kind, path)
        if status is not None:
            start_response(
                f"{status} Fault", [("Content-Type", "application/xml"), ("Content-Length", str(len(_SLOW_DOWN)))]
            )
            return [_SLOW_DOWN]
        return self._measured(self._application(environ, start_response), kind, server)

    def _measured(self, body: Iterable[bytes], kind: str, server: S3Server) -> Iterator[bytes]:
        for block in body:
            if kind == "GET":
                with self._lock:
                    server.sent += len(block)
            yield block


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def _s3_process() -> Iterator[tuple[_Counted, str]]:
    application = _Counted(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield application, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture
def s3(_s3_process: tuple[_Counted, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket; the environment's credentials and endpoint are its own."""
    application, endpoint = _s3_process
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    application.server = None
    server = S3Server(endpoint)
    client = server.client()
    if client.exists(_BUCKET):
        client.rm(_BUCKET, recursive=True)
    client.mkdir(_BUCKET)
    application.server = server
    yield server
    application.server = None
    fsspec.get_filesystem_class("s3").clear_instance_cache()
