"""Sessions of browsers: a random cookie stands for a token, so that no script ever sees the token.

This module must not know HTTP. Sessions live in memory. A session ends with the process, with its token, or when it is
not used. Invariant: there are at most SESSIONS_MAX; a new one replaces the one that was used the longest ago.
"""

from __future__ import annotations

import secrets
from typing import Final

from geventstalk.http.tokens import Token

SESSIONS_MAX: Final = 1000
IDLE_NS: Final = 12 * 3600 * 1_000_000_000
"""A session ends when it is not used for this long."""
LIFE_NS: Final = 7 * 24 * 3600 * 1_000_000_000
"""The longest life of a session."""


class LoginSession:
    """The session of one browser. Its changes carry `csrf`, which a page of another site cannot know."""

    def __init__(self, token: Token, now_ns: int) -> None:
        self.token: Final = token
        self.csrf: Final = secrets.token_urlsafe(24)
        self.began_ns: Final = now_ns
        self.used_ns = now_ns


class Sessions:
    """All sessions, those that were used the longest ago first."""

    def __init__(self) -> None:
        self._sessions: dict[str, LoginSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, token: Token, now_ns: int) -> str:
        """Begins a session. Returns the value of its cookie."""
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        id = secrets.token_urlsafe(32)
        self._sessions[id] = LoginSession(token, now_ns)
        return id

    def find(self, id: str, now_ns: int) -> LoginSession | None:
        """Returns the session of this cookie if it has not ended. Marks it as used."""
        session = self._sessions.pop(id, None)
        if session is None or now_ns - session.used_ns > IDLE_NS or now_ns - session.began_ns > LIFE_NS:
            return None
        session.used_ns = now_ns
        self._sessions[id] = session
        return session

    def end(self, id: str) -> None:
        self._sessions.pop(id, None)
