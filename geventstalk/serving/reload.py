"""The files of a running server, read again: all of them are used, or none.

This module must not know what the files say. Invariant: what is in use changes in one step of the event loop, and only
when every file was read without a fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, Protocol

import gevent
from gevent.lock import BoundedSemaphore

from geventstalk.config import ConfigError, Settings

LIVE: Final = frozenset({"policies", "schedules"})
"""The settings that a running server changes."""


class Source(Protocol):
    """Files that can be read again."""

    @property
    def files(self) -> Sequence[str]: ...

    def read(self) -> Callable[[], None]:
        """Reads the files, and returns a function that puts them into use. Runs in a thread. Raises ConfigError."""


class Reload:
    """Reads all sources again when asked to."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._sources: list[Source] = []
        self._one_at_a_time = BoundedSemaphore(1)
        self.options: Options | None = None
        self.refused = False  # the last reload was

    def add(self, source: Source) -> None:
        self._sources.append(source)
        if isinstance(source, Options):
            self.options = source

    @property
    def files(self) -> list[str]:
        """Returns the files that a reload reads."""
        return [path for source in self._sources for path in source.files]

    @property
    def at_restart(self) -> list[str]:
        """Returns the settings whose new values take effect only after a restart."""
        return [] if self.options is None else list(self.options.changed)

    def run_and_log(self) -> None:
        """Reads everything again, or says in the log why not."""
        with suppress(ConfigError):
            self.run()

    def run(self) -> None:
        """Reads all files again, and uses them from then on. Raises ConfigError, and then nothing has changed."""
        with self._one_at_a_time:
            found: Any = gevent.get_hub().threadpool.apply(_read, (self._sources,))
            self.refused = isinstance(found, ConfigError)
            if isinstance(found, ConfigError):
                self._log.error("%s; nothing is reloaded, what is in use stays", found)
                raise found
            for use in found:
                use()
            if not found:
                self._log.info("there is no file to read again")


def _read(sources: Sequence[Source]) -> Any:
    """Returns a function that puts the files into use, or the reason why they cannot be used. Runs in a thread."""
    try:
        return [source.read() for source in sources]
    except ConfigError as error:  # gevent takes an exception out of a thread for a fault
        return error


class Options:
    """The file of settings. A running server changes those of LIVE; of others a reload says that they have changed."""

    def __init__(
        self,
        path: str,
        settings: Settings,
        load: Callable[[], Settings],
        use: Callable[[Settings], None],
        log: logging.Logger,
    ) -> None:
        self.files: Final = (path,)
        self.changed: tuple[str, ...] = ()
        self._settings = settings
        self._load = load
        self._take = use
        self._log = log

    def read(self) -> Callable[[], None]:
        return partial(self._use, self._load())

    def _use(self, found: Settings) -> None:
        changed = [
            each.name for each in fields(found) if getattr(found, each.name) != getattr(self._settings, each.name)
        ]
        self.changed = tuple(name for name in changed if name not in LIVE)
        path, used = self.files[0], [name for name in changed if name in LIVE]
        if used:
            self._take(found)
            self._settings = replace(self._settings, **{name: getattr(found, name) for name in used})
            self._log.info("read the settings of %s again, and use those that have changed: %s", path, ", ".join(used))
        if self.changed:
            self._log.warning("changed in %s, and in use after a restart only: %s", path, ", ".join(self.changed))
        if not changed:
            self._log.info("read the settings of %s again: none has changed", path)
