"""The few routes of the Hugging Face hub that reading a data set takes, on loopback, for the real client.

A repository is a dict of commits, each a dict of paths and bytes, and branches that point to commits.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "org/pages"


class Hub:
    """`commits` {sha: {path: bytes}}, `branches` {name: sha}; `asked` counts routes, `status` fails them all."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        self.sent = 0
        self.status: int | None = None
        self.endpoint = ""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with just these files and move the branch to it; its sha."""
        sha = hashlib.sha1(repr((sorted(files), len(self.commits))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def answer(self, method: str, path: str, span: str | None) -> tuple[int, dict[str, str], bytes]:
        api, at = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        if self.status is not None:
            return self.status, {}, b"{}"
        if path == api:
            path = f"{api}/revision/main"
        if path.startswith(f"{api}/revision/"):
            self.asked["revision"] += 1
            sha = self._sha(path.removeprefix(f"{api}/revision/"))
            if sha is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            return 200, {}, json.dumps({"id": NAME, "sha": sha, "siblings": []}).encode()
        if path.startswith(f"{api}/tree/"):
            self.asked["tree"] += 1
            revision, _, folder = path.removeprefix(f"{api}/tree/").partition("/")
            found = self._tree(revision, unquote(folder))
            return (200, {}, json.dumps(found).encode()) if found else (404, {"X-Error-Code": "EntryNotFound"}, b"{}")
        if path.startswith(at):
            self.asked["file"] += 1
            revision, _, name = path.removeprefix(at).partition("/")
            body = self.commits[self._sha(revision) or ""][unquote(name)]
            first, _, last = (span or "bytes=0-").removeprefix("bytes=").partition("-")
            part = body[int(first) : int(last) + 1 if last else None]
            self.sent += len(part)
            return 206 if span else 200, {"ETag": f'"{_blob(body)}"', "X-Repo-Commit": revision}, part
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _sha(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(unquote(revision))

    def _tree(self, revision: str, folder: str) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        inside = f"{folder}/" if folder else ""
        for path, body in self.commits[self._sha(revision) or ""].items():
            if path.startswith(inside):
                name, deeper, _ = path.removeprefix(inside).partition("/")
                found[name] = (
                    {"type": "directory", "oid": _blob(name.encode()), "size": 0, "path": inside + name}
                    if deeper
                    else {"type": "file", "oid": _blob(body), "size": len(body), "path": path}
                )
        return [found[name] for name in sorted(found)]


def _blob(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """The hub on a port of loopback; `endpoint` is its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, urlsplit(self.path).path, self.headers.get("Range"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *told: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
