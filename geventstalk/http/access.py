"""Access over HTTP: the server's names, tokens, roles, and protection from pages of other sites.

This module must not know resources, only whether a request changes something. No message says why a token is wrong.
Invariant: a request whose `Host` is unknown, or that another site's page sends, never reaches a resource. Without
tokens only this host can connect (see serving/listen.py), and every client is an admin.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final, Literal

import falcon
from gevent import get_hub, sleep
from gevent.lock import BoundedSemaphore

from geventstalk.config import ConfigError
from geventstalk.http.audit import Audit, Entry
from geventstalk.http.scope import EVERYTHING, Scope
from geventstalk.http.sessions import LoginSession, Sessions
from geventstalk.http.tokens import Role, Source, Token, Tokens

COOKIE: Final = "geventstalk"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_IP_LITERAL: Final = re.compile(r"\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]")
_GUESS_DELAY_S: Final = 0.5
_DELAYED_MAX: Final = 16
"""The number of wrong tokens that are answered late at a time. Further ones are refused at once, so that they do not
use up the connections.
"""
_LOOK_EVERY_NS: Final = 2_000_000_000
"""The interval between checks of the file of tokens."""


@dataclass(frozen=True)
class Who:
    """The sender of a request."""

    name: str
    role: Role | Literal[""]  # none where a token is refused
    address: str
    via: str = "api"
    session: LoginSession | None = None
    scope: Scope = EVERYTHING


class Access:
    """Checks requests. `hosts` are the names at which the server listens, `proxies` further ones, both in lower
    case.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        proxies: Iterable[str],
        tokens: Tokens | None,
        audit: Audit,
        log: logging.Logger,
    ) -> None:
        self._proxies = frozenset(proxies)
        self._hosts = self._proxies | {"localhost", *hosts}
        self._file = tokens
        self._sources: list[Source] = [] if tokens is None else [tokens]
        self._sessions = Sessions()
        self._audit = audit
        self._log = log
        self._looked_ns = 0
        self._delayed = 0
        self._one_at_a_time = BoundedSemaphore(1)

    def add(self, source: Source) -> None:
        """Has the tokens of another source count, too."""
        self._sources.append(source)

    @property
    def asks_for_tokens(self) -> bool:
        return bool(self._sources)

    # --- origins

    def require_known_host(self, req: falcon.Request) -> None:
        """Refuses a page that reaches this server by a name of its own (DNS rebinding). Raises HTTPError.

        Such a page needs a name: with an address in `Host` the page came from that very address.
        """
        host = req.get_header("Host")
        if host is not None and not self._is_ours(host):
            raise falcon.HTTPError(
                falcon.HTTP_421,
                title="Misdirected Request",
                description="This server does not know the name by which it was called; --http-host makes it known.",
            )

    def _is_ours(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower().removesuffix(".")
        return name in self._hosts or _IP_LITERAL.fullmatch(name) is not None or name.endswith(".localhost")

    def require_own_page(self, req: falcon.Request) -> None:
        """Refuses requests of other sites' pages, except for links to follow. Raises HTTPError.

        A frame in such a page is refused: a page could have a hundred of them, each with a search.
        """
        site = req.get_header("Sec-Fetch-Site")
        safe = req.method in SAFE_METHODS
        if site is not None:
            link = req.get_header("Sec-Fetch-Mode") == "navigate" and (
                req.get_header("Sec-Fetch-Dest") in (None, "document")
            )
            if site in ("same-origin", "none") or (safe and link):
                return
        elif safe or self._is_own_origin(req.get_header("Origin"), req.get_header("Host")):
            return
        raise falcon.HTTPForbidden(description="A page of another site sends this request.")

    def _is_own_origin(self, origin: str | None, host: str | None) -> bool:
        """Returns whether the page of this origin is ours. Its scheme may be a proxy's."""
        if origin is None:
            return True  # no browser
        found = re.fullmatch(r"https?://([^/@]+)", origin.lower())
        if found is None:
            return False
        name = re.sub(r":\d*$", "", found[1])
        return found[1] == (host or "").lower() or name in self._proxies

    # --- senders

    def identify(self, req: falcon.Request, now_ns: int) -> Who | None:
        """Returns the sender of the request; None when the request names none. Raises HTTPError when the name is
        wrong.
        """
        address, via = _address(req), _via(req)
        if not self._sources:
            return Who("local", "admin", address, via)
        self._follow_file(now_ns)
        scheme, _, text = (req.auth or "").partition(" ")
        if scheme.lower() != "bearer":
            session = self._session_of(req, now_ns)
            if session is None:
                return None
            known = session.token
            return Who(known.name, known.role, address, via, session, known.scope)
        token = self._find_token(text.strip(), address, via, now_ns)
        if token is None:
            raise falcon.HTTPUnauthorized(description="The token is not known.", challenges=("Bearer",))
        return Who(token.name, token.role, address, via, None, token.scope)

    def still_knows(self, req: falcon.Request, who: Who, now_ns: int) -> bool:
        """Returns whether the sender of this request would be admitted again. Never waits."""
        if not self._sources:
            return True
        self._follow_file(now_ns)
        if who.session is not None:
            return self._session_of(req, now_ns) is who.session
        token = self._find((req.auth or "").partition(" ")[2].strip())
        return token is not None and (token.name, token.role) == (who.name, who.role)

    def _find(self, text: str) -> Token | None:
        found = [source.find(text) for source in self._sources]
        return next((token for token in found if token is not None), None)

    def _find_token(self, text: str, address: str, via: str, now_ns: int) -> Token | None:
        """Returns the token with this text. A wrong guess takes time, delays no other request, and is logged."""
        found = self._find(text)
        slow = [] if found is not None else [source for source in self._sources if source.is_slow(text)]
        if slow and self._delayed < _DELAYED_MAX:
            self._delayed += 1
            try:
                with self._one_at_a_time:
                    for source in slow:
                        get_hub().threadpool.apply(source.prove, (text,))
            finally:
                self._delayed -= 1
            found = self._find(text)
        if found is None:
            self._audit.refuse_token(Who("", "", address, via), now_ns)
        if found is None and self._delayed < _DELAYED_MAX:
            self._delayed += 1
            try:
                sleep(_GUESS_DELAY_S)
            finally:
                self._delayed -= 1
        return found

    # --- sessions

    def _session_of(self, req: falcon.Request, now_ns: int) -> LoginSession | None:
        """Returns the session of the request's cookie, as long as its token counts."""
        cookie = _cookie(req)
        session = self._sessions.find(cookie, now_ns)
        if session is not None and not any(source.holds(session.token) for source in self._sources):
            self._sessions.end(cookie)
            return None
        return session

    def log_in(self, req: falcon.Request, text: str, now_ns: int) -> tuple[str, str] | None:
        """Begins a session for this token. Returns name and value of its cookie; None for an unknown token."""
        self._follow_file(now_ns)
        address = _address(req)
        token = self._find_token(text, address, "console", now_ns)
        if token is None:
            return None
        self._log.info("%s logged in over HTTP from %s", token.name, address)
        self._audit.record(Who(token.name, token.role, address, "console"), "log in", 1)
        self.log_out(req)  # or the browser forgets a session that has not ended
        return _cookie_name(req), self._sessions.begin(token, now_ns)

    def log_out(self, req: falcon.Request) -> str:
        """Ends the session of the request. Returns the name of its cookie."""
        self._sessions.end(_cookie(req))
        return _cookie_name(req)

    # --- tokens

    def _follow_file(self, now_ns: int) -> None:
        """Reads the file of tokens again soon after it was changed. A file with a fault changes nothing."""
        tokens = self._file
        if tokens is None or now_ns - self._looked_ns < _LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        if tokens.has_changed():
            try:
                tokens.read_again()
            except ConfigError as error:
                self._log.error("the tokens stay as they were: %s", error)
            else:
                self._log.info("read the file of tokens again")

    def require(self, who: Who | None, req: falcon.Request, of_tubes: Collection[str]) -> None:
        """Raises HTTPError when the sender may not send such a request.

        `of_tubes` are the methods of the resource that look at the rights on tubes themselves. All others are for those
        who may look at every tube, and change everything.
        """
        if who is None:
            raise falcon.HTTPUnauthorized(description="A token is needed.", challenges=("Bearer",))
        by_rights = who.role == "user" and req.method in of_tubes
        if req.method in SAFE_METHODS:
            if not by_rights and not who.scope.sees_all:
                raise falcon.HTTPForbidden(description="This is for users who may look at every tube.")
            return
        if who.role != "admin" and not by_rights:
            why = "has no right to do this." if who.role == "user" else "may only read."
            raise falcon.HTTPForbidden(description=f"The token {who.name} {why}")
        given = req.get_header("X-CSRF-Token") or ""
        if who.session is not None and not compare_digest(given.encode(), who.session.csrf.encode()):
            raise falcon.HTTPForbidden(description="The header X-CSRF-Token is missing or wrong.")


def _cookie_name(req: falcon.Request) -> str:
    """Returns the cookie's name. Browsers share cookies among the ports of a host, so each server has a name of its
    own.
    """
    port = (req.get_header("Host") or "").rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isdecimal() else COOKIE


def _cookie(req: falcon.Request) -> str:
    """Returns the cookie of a session, or an empty text.

    falcon unquotes every cookie, which takes Python before 3.11.10 a second for one of 16 kB.
    """
    name = _cookie_name(req)
    pairs = (pair.strip().partition("=") for pair in (req.get_header("Cookie") or "").split(";"))
    return next((value for found, _, value in pairs if found == name), "")


def _address(req: falcon.Request) -> str:
    return str(req.env.get("geventstalk.peer", ""))


def _via(req: falcon.Request) -> str:
    via = req.get_header("X-Geventstalk-Via")
    return via if via in ("cli", "console") else "api"


SECURITY_HEADERS: Final[dict[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: with that, browsers hide the origin of a login from this server, too.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def who_sends(req: falcon.Request) -> Who:
    """Returns the sender of a request that has come to a resource."""
    who: Any = req.context.who
    assert isinstance(who, Who)
    return who


def shows_entry(entry: Entry, who: Who) -> bool:
    """Returns whether an entry of the audit may be looked at: those of a visible tube, and the sender's own."""
    if who.scope.sees_all or (entry["who"], entry["role"]) == (who.name, who.role):
        return True
    tube = entry.get("tube")
    return tube is not None and not entry.get("filter") and who.scope.looks(tube.encode())
