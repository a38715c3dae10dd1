"""A stand-in for the Hub on this machine: the routes by which one repository is made, written and read."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Repository:
    """Files at one commit, whether strangers may read them, and the requests that were made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.private: bool | None = None  # None: not there
        self.token = "secret"
        self.files: dict[str, bytes] = {}
        self.seen: list[str] = []

    @property
    def commit(self) -> str:
        listed = {path: hashlib.sha1(content).hexdigest() for path, content in sorted(self.files.items())}
        return hashlib.sha1(json.dumps(listed).encode()).hexdigest()

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in self.files.items()
        ]

    def info(self) -> dict[str, object]:
        siblings = [{"rfilename": path} for path in self.files]
        return {"id": self.name, "sha": self.commit, "private": self.private, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, to holders of the repository's token."""

    repository: Repository
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        repo, path = self.repository, urlsplit(self.path).path
        repo.seen.append(f"{self.command} {path}")
        here = f"http://{self.headers['Host']}"
        api, where = f"/api/models/{repo.name}", f"/{repo.name}/resolve/{repo.commit}/"
        if self.headers.get("Authorization") != f"Bearer {repo.token}":
            self._send(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            repo.private = wanted.get("private", wanted.get("visibility") == "private")
            self._send(200, {"url": f"{here}/{repo.name}", "name": repo.name})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif repo.private is None:
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif path == f"{api}/preupload/main":
            files = [each["path"] for each in json.loads(body)["files"]]
            self._send(200, {"files": [
                {"path": each, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for each in files
            ]})  # fmt: skip
        elif path == f"{api}/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repo.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._send(200, {"commitUrl": f"{here}/{repo.name}/commit/{repo.commit}",
                "commitOid": repo.commit, "success": True})  # fmt: skip
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{repo.commit}"):
            self._send(200, repo.info())
        elif path.startswith(f"{api}/tree/"):
            self._send(200, repo.tree())
        elif path.startswith(where) and (content := repo.files.get(path.removeprefix(where))) is not None:
            etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": repo.commit}
            self._send(200, content, etag)
        else:
            self._send(404, {"error": f"no {path}"}, {"X-Error-Code": "EntryNotFound"})

    def _send(self, code: int, content: object, headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


@contextmanager
def hub(name: str) -> Iterator[tuple[str, Repository]]:
    """Serve one repository that is not there yet; its address and what it is."""
    repository = Repository(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Handler,), {"repository": repository}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", repository
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
