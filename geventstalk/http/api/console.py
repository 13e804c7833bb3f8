"""The console's files, read and compressed once, when the server starts.

This module must not know the pages. The pages request the API, with the rights of the browser. Invariant: the address
of a file holds a hash of all files, so the console's files in a browser fit together and are kept for ever. The page
that names the hash is requested anew each time.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import falcon

from geventstalk.filters import NUMBERS, SAYS, TRIES
from geventstalk.http.backend import Backend

PAGES: Final = ("tubes", "jobs", "connections", "users", "policies", "journal", "nodes", "audit", "help")
"""The first part of each address that is a page; the console's own script reads the rest."""
_NAMED: Final = ("tubes", "jobs")
"""The pages of which each has further ones below it: one for each name."""
FOR_EVER: Final = "public, max-age=31536000, immutable"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
}
_PAGE: Final = "index.html"
_PLAIN_SCRIPTS: Final = ("theme.js",)
"""Scripts that are no modules and so are not preloaded as modules."""


class File(NamedTuple):
    """One file as it is sent. `packed` is empty where gzip saves nothing."""

    content_type: str
    plain: bytes
    packed: bytes
    etag: str


class Files:
    """All files of the console. `folder` is the hash in their addresses."""

    def __init__(self, root: Path) -> None:
        sources = {**dict(_read(root)), "keys.js": _keys_of_filters()}
        page = sources.pop(_PAGE).decode()
        every = hashlib.sha256()
        for name, data in sorted(sources.items()):
            every.update(f"{name}\0{len(data)}\0".encode() + data)
        self.folder: Final = every.hexdigest()[:16]
        self._files = {name: _file(name, data) for name, data in sources.items()}
        base = f"/assets/{self.folder}"
        ahead = [
            f'<link rel="modulepreload" href="{base}/{name}">'
            for name in sorted(sources)
            if name.endswith(".js") and name not in _PLAIN_SCRIPTS
        ]
        # All modules are requested at once, instead of each when the one that imports it has come.
        page = page.replace("@preload@", "\n".join(ahead)).replace("@assets@", base)
        self.page: Final = _file(_PAGE, page.encode())
        self.icon: Final = self._files["icon.svg"]

    def find(self, folder: str, name: str) -> File | None:
        """Returns the file at this address; None for another version's."""
        return self._files.get(name) if folder == self.folder else None

    def names(self) -> list[str]:
        return sorted(self._files)


@functools.cache
def load() -> Files:
    """Loads the files of the console from the package."""
    return Files(Path(__file__).resolve().parents[1] / "console")


def _read(folder: Path, prefix: str = "") -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found


def _keys_of_filters() -> bytes:
    """Returns the module that tells the console each key of a filter: its meaning, and values to begin with."""
    keys = {key: {"says": SAYS[key], "number": key in NUMBERS, "tries": TRIES.get(key, ())} for key in SAYS}
    return f"export const KEYS = {json.dumps(keys)};\n".encode()


def _file(name: str, data: bytes) -> File:
    packed = gzip.compress(data, 9, mtime=0)
    digest = hashlib.sha256(data).hexdigest()[:16]
    content_type = _TYPES[name.rpartition(".")[2]]
    return File(content_type, data, packed if len(packed) < len(data) else b"", f'"{digest}"')


class PageResource:
    """GET of any page: the same document, whose script reads the address."""

    public = True

    def __init__(self, files: Files) -> None:
        self._files = files

    def on_get(self, req: falcon.Request, resp: falcon.Response, **parts: str) -> None:
        _send(req, resp, self._files.page, "no-cache")


class NowhereSink:
    """GET of anything else by a browser: the same document, which says that there is no such page, with status 404."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __call__(self, req: falcon.Request, resp: falcon.Response, **parts: str) -> None:
        if req.method not in ("GET", "HEAD") or "text/html" not in (req.get_header("Accept") or ""):
            raise falcon.HTTPRouteNotFound
        _send(req, resp, self._files.page, "no-store", falcon.HTTP_404)


class AssetsResource:
    """GET /assets/HASH/NAME"""

    public = True

    def __init__(self, files: Files) -> None:
        self._files = files

    def on_get(self, req: falcon.Request, resp: falcon.Response, folder: str, name: str) -> None:
        file = self._files.find(folder, name)
        if file is None:
            raise falcon.HTTPNotFound(description="The console has no such file.")
        _send(req, resp, file, FOR_EVER)


class IconResource:
    """GET /favicon.ico, which browsers request where a page names no icon."""

    public = True

    def __init__(self, files: Files) -> None:
        self._file = files.icon

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        _send(req, resp, self._file, "max-age=86400")


def _send(req: falcon.Request, resp: falcon.Response, file: File, caching: str, status: str = falcon.HTTP_200) -> None:
    resp.status = status
    resp.set_header("Cache-Control", caching)
    resp.set_header("Vary", "Accept-Encoding")
    resp.set_header("ETag", file.etag)
    if status == falcon.HTTP_200 and file.etag in (req.get_header("If-None-Match") or ""):
        resp.status = falcon.HTTP_304
        return
    resp.content_type = file.content_type
    if file.packed and _takes_gzip(req.get_header("Accept-Encoding") or ""):
        resp.set_header("Content-Encoding", "gzip")
        resp.data = file.packed
    else:
        resp.data = file.plain


def _takes_gzip(accepts: str) -> bool:
    for entry in accepts.lower().split(","):
        coding, _, weight = entry.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def add(app: Any, backend: Backend) -> None:
    files = load()
    page = PageResource(files)
    app.add_route("/", page)
    for name in PAGES:
        app.add_route(f"/{name}", page)
    for name in _NAMED:
        app.add_route(f"/{name}/{{rest:path}}", page)
    app.add_route("/favicon.ico", IconResource(files))
    app.add_route("/assets/{folder}/{name:path}", AssetsResource(files))
    app.add_sink(NowhereSink(files), "/(?!api/|assets/)")
