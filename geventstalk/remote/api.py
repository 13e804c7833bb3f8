"""A client of the server's HTTP API (http/openapi.yaml) over http.client, on TCP, TLS or a unix socket.

Invariant: each call returns an answer or raises an error of errors.py. Redirects are not followed: the token is for the
address that it was given for.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from geventstalk.remote.address import UNIX
from geventstalk.remote.errors import Absent, Nonsense, NotAllowed, NotDone, Unreachable, why_lost
from geventstalk.remote.shapes import checked_job

if TYPE_CHECKING:
    import ssl

_ROOT: Final = "/api/v1"
_ANSWER_BYTES_MAX: Final = 1 << 28
_PATIENCE_S: Final = 120.0
PAGE: Final = 1000
"""The most jobs or tubes of one answer."""

Answer = dict[str, Any]


class BadAddress(Exception):
    """The text is no address of an API. The message is for the user."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path: Final = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Api:
    """The API of one server. `where` is `unix:PATH`, `HOST:PORT` or a URL."""

    def __init__(
        self, where: str, token: str | None, timeout_s: float, program: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connects at the first request. `program` is the name of this client. Raises BadAddress."""
        self.where: Final = where
        self._timeout_s: Final = timeout_s
        self._headers: Final = {"User-Agent": program, "Accept": "application/json", "X-Geventstalk-Via": "cli"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection, self._root = _connection(where, timeout_s, tls)

    def close(self) -> None:
        self._connection.close()

    # Requests

    def get(self, path: str, **query: object) -> Answer:
        """Returns the resource. Values that are None or empty are left out of the query."""
        words = {key: _word(value) for key, value in query.items() if value is not None and value != ""}
        return self._ask("GET", f"{path}?{urlencode(words)}" if words else path)

    def post(self, path: str, content: Mapping[str, object] | None = None) -> Answer:
        return self._ask("POST", path, content)

    def post_patiently(self, path: str, content: Mapping[str, object]) -> Answer:
        """As post(), for requests that the server answers only after it has looked at each job."""
        self._wait(max(self._timeout_s, _PATIENCE_S))
        try:
            return self._ask("POST", path, content)
        finally:
            self._wait(self._timeout_s)

    def _wait(self, timeout_s: float) -> None:
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)

    def patch(self, path: str, content: Mapping[str, object]) -> Answer:
        return self._ask("PATCH", path, content)

    def put(self, path: str, content: Mapping[str, object]) -> Answer:
        return self._ask("PUT", path, content)

    def delete(self, path: str) -> Answer:
        return self._ask("DELETE", path)

    def jobs(self, filter: str, *, newest_first: bool, body: int, most: int | None) -> Iterator[Answer]:
        """Yields the jobs that match, a page a request."""
        cursor: str | None = None
        while most is None or most > 0:
            limit = PAGE if most is None else min(PAGE, most)
            page = self.get(
                "/jobs", filter=filter, cursor=cursor, limit=limit, descending=newest_first or None, body=body
            )
            jobs = [checked_job(one) for one in field(page, "jobs", list)]
            yield from jobs
            most = None if most is None else most - len(jobs)
            cursor = page.get("next")
            if cursor is None:
                return

    def job(self, id: int, body: int) -> Answer:
        """Returns a job with at most `body` bytes of its body. Raises Absent."""
        return checked_job(self.get(f"/jobs/{id}", body=body))

    def lines(self, path: str, **query: str) -> Iterator[bytes]:
        """Yields the lines of a long answer as they come. Raises Unreachable when the answer has no end."""
        with self._guard():
            self._connection.request("GET", f"{self._root}{path}?{urlencode(query)}", None, self._headers)
            response = self._connection.getresponse()
            if response.status == 200:
                while line := response.readline():
                    yield line
                return
            text = response.read(_ANSWER_BYTES_MAX)
        raise self._problem(response.status, self._decoded(text, response.status))

    def _ask(self, method: str, path: str, content: Mapping[str, object] | None = None) -> Answer:
        data = None if content is None else json.dumps(content).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        with self._guard():
            try:
                status, text = self._exchange(method, path, data, headers)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # The server may have closed an idle connection. It may have made a change: only a GET is sent again.
                self._connection.close()
                if method != "GET":
                    raise
                status, text = self._exchange(method, path, data, headers)
        if 200 <= status < 300 and not text:
            return {}
        answer = self._decoded(text, status)
        if 200 <= status < 300:
            return answer
        raise self._problem(status, answer)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turns the exceptions of sockets and http.client into errors of errors.py."""
        try:
            yield
        except TimeoutError:
            raise self._unreachable(f"did not answer within {self._timeout_s:g} s") from None
        except ConnectionRefusedError:
            raise Unreachable(f"no API listens at {self.where}") from None
        except (ConnectionError, http.client.IncompleteRead):
            raise self._unreachable("closed the connection") from None
        except http.client.HTTPException:
            raise self._nonsense() from None
        except OSError as error:
            raise Unreachable(f"cannot reach the API at {self.where}: {why_lost(error)}") from None
        except (UnicodeError, ValueError) as error:  # the name cannot be encoded
            raise Unreachable(f"cannot reach the API at {self.where}: {error}") from None

    def _exchange(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            self._connection.request(method, self._root + path, data, headers)
            response = self._connection.getresponse()
            text = response.read(_ANSWER_BYTES_MAX)
            if response.length:
                raise http.client.IncompleteRead(text)
        except BaseException:
            self._connection.close()  # the rest of this answer must not be taken for the next one
            raise
        return response.status, text

    def _decoded(self, text: bytes, status: int) -> Answer:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            return answer
        if status in (401, 403):
            return {}
        raise self._nonsense()

    def _problem(self, status: int, answer: Answer) -> Exception:
        detail = str(answer.get("detail") or f"the server answers {answer.get('title') or status}").rstrip(".")
        text = detail[:1].lower() + detail[1:]
        if status == 401:
            if "Authorization" in self._headers:
                return NotAllowed(f"the API at {self.where} does not know the token")
            return NotAllowed(f"the API at {self.where} wants a token: --token-file or GEVENTSTALK_TOKEN")
        if status == 403:
            return NotAllowed(f"the API at {self.where} does not allow it: {text}")
        if status == 404:
            return Absent(text)
        return NotDone(text)

    def _unreachable(self, what: str) -> Unreachable:
        return Unreachable(f"the API at {self.where} {what}")

    def _nonsense(self) -> Nonsense:
        return Nonsense(f"what answers at {self.where} is not the API of geventstalk")


def field(answer: Answer, key: str, kind: type) -> Any:
    """Returns a field that the API promises. Raises Nonsense."""
    value = answer.get(key)
    if not isinstance(value, kind):
        raise Nonsense(f"the API's answer has no {key}")
    return value


def tube_path(name: str) -> str:
    """Returns the path of a tube, for any name."""
    return f"/tube?{urlencode({'name': name})}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _connection(where: str, timeout_s: float, tls: ssl.SSLContext | None) -> tuple[http.client.HTTPConnection, str]:
    if where.startswith(UNIX):
        if where == UNIX:
            raise BadAddress(f"{where} has no path")
        return _UnixConnection(where[len(UNIX) :], timeout_s), _ROOT
    url = where if "://" in where else f"http://{where}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadAddress(f"{where} is no address of an API: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise BadAddress(f"{where} is no address of an API; write http://HOST:PORT or unix:PATH")
    root = parts.path.rstrip("/").removesuffix(_ROOT) + _ROOT
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname, port, timeout=timeout_s, context=tls), root
    return http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s), root
