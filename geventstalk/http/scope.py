"""The limits of what a request may read and change: everything, or what the rights of a user on tubes grant.

This module must not know requests or resources. Rights are looked up anew each time, so those that a reload takes away
are gone at once, also for a long answer, a stream or a bulk change that is under way. Invariant: what may not be looked
at is answered as what does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from geventstalk.rights import ALL, LOOK, OPERATE, User


class Scope:
    """`user` returns the user as of now, None when the user is gone. Without it, everything may be seen and changed."""

    def __init__(self, user: Callable[[], User | None] | None = None) -> None:
        self._user = user

    @property
    def sees_all(self) -> bool:
        """Returns whether every tube, and the figures of all tubes together, may be looked at."""
        if self._user is None:
            return True
        user = self._user()
        return user is not None and user.sees_all

    @property
    def user(self) -> User | None:
        """The user as of now; None where there are no such rules."""
        return None if self._user is None else self._user()

    @property
    def rights(self) -> dict[str, int] | None:
        """The rights by patterns of tubes; None where there are no such rules."""
        if self._user is None:
            return None
        user = self._user()
        return {} if user is None else user.rights

    def may(self, tube: bytes, right: int) -> bool:
        """Returns whether this may be done in a tube, which need not exist."""
        return self._on(tube) & right != 0

    def looks(self, tube: bytes) -> bool:
        return self._on(tube) & LOOK != 0

    def _on(self, tube: bytes) -> int:
        if self._user is None:
            return ALL | OPERATE
        user = self._user()
        return 0 if user is None else user.on(tube)


EVERYTHING: Final = Scope()
