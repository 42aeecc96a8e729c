"""A model hub on the loopback interface, as far as pushing and loading a repository needs one.

It keeps repositories in memory and stops when its `with` block ends. Point a process at it with `HF_ENDPOINT` set to
`server.endpoint`, `HF_TOKEN` to anything and `HF_HUB_DISABLE_XET` to 1, all before huggingface_hub is imported.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves `self.repositories`, a dict of repository id to a dict of path to bytes.

    Attributes:
        endpoint (`str`): the address, "http://127.0.0.1:PORT", once inside the `with` block.
        requests (`list[str]`): every request as "METHOD /path".
        unknown (`list[str]`): those among them that the server has no answer for.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def revision_of(self, repository: str) -> str:
        """A commit id that changes with the content."""
        files = self.repositories[repository]
        return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def do_POST(self) -> None:
        path = self._note()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        commit = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", path)
        preupload = re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            self.hub.repositories.setdefault(name, {})
            self._send_json({"url": f"{self.hub.endpoint}/{name}"})
        elif path == "/api/validate-yaml":
            self._send_json({"errors": [], "warnings": []})
        elif preupload:
            files = json.loads(body)["files"]
            answer = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self._send_json({"files": answer})
        elif commit:
            name = commit.group(1)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.hub.repositories[name][line["value"]["path"]] = content
            revision = self.hub.revision_of(name)
            self._send_json({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{revision}", "commitOid": revision})
        else:
            self._refuse(path)

    def _read(self) -> None:
        path = self._note()
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?", path)
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
        found = resolve or tree or about
        if found is None:
            self._refuse(path)
        elif found.group(1) not in self.hub.repositories:
            self._send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif resolve:
            self._send_file(*resolve.groups())
        elif tree:
            files = self.hub.repositories[found.group(1)]
            folder = (found.group(2) or "").rstrip("/")
            inside = [name for name in files if not folder or name.startswith(folder + "/")]
            if folder and not inside:
                self._send_json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            self._send_json([
                {"type": "file", "path": name, "size": len(files[name]), "oid": hashlib.sha1(files[name]).hexdigest()}
                for name in inside
            ])  # fmt: skip
        else:
            name = found.group(1)
            siblings = [{"rfilename": one} for one in self.hub.repositories[name]]
            self._send_json({"id": name, "sha": self.hub.revision_of(name), "siblings": siblings, "tags": []})

    def _note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _send_file(self, repository: str, name: str) -> None:
        content = self.hub.repositories[repository].get(name)
        commit = {"X-Repo-Commit": self.hub.revision_of(repository)}
        if content is None:
            self._send_json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", **commit})
        else:
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._send(content, 200, {"ETag": etag, "Accept-Ranges": "bytes", **commit})

    def _refuse(self, path: str) -> None:
        self.hub.unknown.append(f"{self.command} {path}")
        self._send_json({"error": "No such endpoint"}, 404, {})

    def _send_json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
