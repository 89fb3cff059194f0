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

KEY, SECRET = "AKIALOOPBACKTESTKEY0", "marker-secret-of-the-loopback-store"
_BUCKET = "bucket"
_CODES = {
    400: "ExpiredToken",
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    500: "InternalError",
    503: "SlowDown",
}


class S3Server:
    """`url` of an empty bucket; `requests` by kind ("LIST", "HEAD", "GET", "PUT", …) and `sent`, bytes of objects."""

    def __init__(self, endpoint: str, client: Any) -> None:
        self.endpoint = endpoint
        # the test's own, which holds no listing
        self.client = client
        self.url = f"s3://{_BUCKET}"
        self.requests: Counter[str] = Counter()
        self.sent = 0
        # told of each request's kind and path; a status it returns is the answer
        self.fault: Callable[[str, str], int | None] = lambda kind, path: None
        # the same, but the request is carried out: only its answer is lost
        self.lost: Callable[[str, str], int | None] = lambda kind, path: None
        # what the request itself says, for those who look at its headers
        self.environ: dict[str, Any] = {}

    def reset(self) -> None:
        """Count from here, and fail no more."""
        self.requests.clear()
        self.sent = 0
        self.fault = self.lost = lambda kind, path: None

    def upload(self, folder: Path, to: str = "") -> str:
        """Put a folder's files into the bucket; the URL they lie under."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.pipe_file(
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
        # not under the lock: it may ask the server for something itself
        server.environ = environ
        status = server.fault(kind, path)
        if status is None and (status := server.lost(kind, path)) is not None:
            list(self._application(environ, lambda *told: None))
        if status is not None:
            told = (
                f"<Error><Code>{_CODES[status]}</Code><Message>{_CODES[status]} as asked for</Message></Error>".encode()
            )
            start_response(f"{status} Fault", [("Content-Type", "application/xml"), ("Content-Length", str(len(told)))])
            return [told]
        return self._measured(self._application(environ, start_response), kind, server)

    def _measured(self, body: Iterable[bytes], kind: str, server: S3Server) -> Iterator[bytes]:
        for block in body:
            if kind == "GET":
                with self._lock:
                    server.sent += len(block)
            yield block


@pytest.fixture(scope="session")
def s3_process() -> Iterator[tuple[_Counted, str, Any]]:
    """The server's application, its address and a client, for the whole session."""
    s3fs = pytest.importorskip("s3fs", reason="object stores need the extra: pip install 'dagster-datamask[s3]'")
    moto = pytest.importorskip("moto.moto_server.werkzeug_app", reason="the S3 server of tests needs moto[server]")
    serving = pytest.importorskip("werkzeug.serving", reason="the S3 server of tests needs moto[server]")
    quiet = type("Quiet", (serving.WSGIRequestHandler,), {"log": lambda *told: None})
    application = _Counted(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = serving.make_server("127.0.0.1", 0, application, threaded=True, request_handler=quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client = s3fs.S3FileSystem(
        key=KEY, secret=SECRET, endpoint_url=endpoint, skip_instance_cache=True, use_listings_cache=False
    )
    s3fs.S3FileSystem.clear_instance_cache()
    yield application, endpoint, client
    s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    thread.join()


@pytest.fixture
def s3(s3_process: tuple[_Counted, str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket; the environment's credentials and endpoint are its own."""
    application, endpoint, client = s3_process
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
    application.server = None
    server = S3Server(endpoint, client)
    if client.exists(_BUCKET):
        client.rm(_BUCKET, recursive=True)
    client.mkdir(_BUCKET)
    # clients live as long as the process, and remember what the bucket held
    for other in type(client)._cache.values():
        other.invalidate_cache()
    application.server = server
    yield server
    application.server = None
