"""The front-end processes: who starts them, tells them to accept, restarts those that die, and ends them.

This module must not know the engine, the journal, nor clients. Only who watches over a front has a greenlet.
Invariant: a front that may accept sees each connection that waits at a listener, whatever happens to other fronts.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import gevent

from geventstalk.exits import STOP_SIGNALS
from geventstalk.front import frames as f
from geventstalk.serving.link import Link, LinkOwner

RESTART_S: Final = 0.1
RESTART_S_MAX: Final = 5.0
"""The longest pause before a front that ends again and again is started again."""
LIVED_S: Final = 10.0
"""A front that has lived for this long is started again at once."""
CLIENTS_AHEAD_MAX: Final = 4
"""A front that has more clients more than another one lets the other one accept first."""
CATCH_UP_S: Final = 0.02
"""The time to wait for another front, which may stand still."""
START_S_MAX: Final = 5.0
"""The fronts that are ready do not wait any longer for one that is not."""
_END_S: Final = 2.0
"""The end waits this long for the fronts, and then kills them."""
_PATH: Final = "_GEVENTSTALK_PATH"
_CODE: Final = (
    f"import os, sys; sys.path[:] = os.environ.pop({_PATH!r}).split(os.pathsep); "
    "from geventstalk.front.front import end_with, main; end_with(int(sys.argv[2])); main(sys.argv[3:])"
)
"""Where this process finds its modules, a front does, too; and it finds them nowhere else."""
_ENVIRONMENT: Final = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_")
"""Prefixes of the environment variables that a front gets: those of the C library. Others may hold a password."""
_HELD_SIGNALS: Final = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


class Fronts(LinkOwner):
    """Starts the fronts, and starts again those that end."""

    def __init__(
        self,
        count: int,
        listeners: list[socket.socket],
        make_link: Callable[[socket.socket, Fronts], Link],
        log: logging.Logger,
        fails: Callable[[str], None],
    ) -> None:
        """`fails` is called when no front can be started at all."""
        self._count = count
        self._listeners = listeners
        self._make_link = make_link
        self._log = log
        self._fails = fails
        self._links: list[Link | None] = [None] * count
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._keepers: list[Any] = []
        self._accepts = False
        self._opened = False  # whether fronts were told to accept
        self._catching_up: Any = gevent.get_hub().loop.timer(CATCH_UP_S)
        self._greeted = False  # whether one ever was ready
        self.restarts = 0

    def start(self) -> None:
        """Raises OSError when a process cannot be started."""
        for at in range(self._count):
            self._start(at)
        self._keepers = [gevent.spawn(self._keep, at) for at in range(self._count)]

    def accept(self) -> None:
        """The fronts begin together, or the first one would have all clients that wait."""
        self._accepts = True
        if all(link is not None and link.greeted for link in self._links):
            self._open()
        else:
            self._keepers.append(gevent.spawn_later(START_S_MAX, self._open))

    def greeted(self, link: Link) -> None:
        """A front is ready."""
        self._greeted = True
        if self._opened:
            link.say(f.frame(0, f.ACCEPT))
        elif self._accepts and all(each is not None and each.greeted for each in self._links):
            self._open()

    def came(self, link: Link) -> None:
        """Counts a client. The front may accept another one, unless it has many more clients than other fronts."""
        if self._count > 1:
            link.to_accept += 1
            self._let_accept(CLIENTS_AHEAD_MAX)

    def refused(self, link: Link) -> None:
        """Has the other fronts look for connections: the system woke one front only, and that one accepts no more."""
        if self._opened:
            for each in self._links:
                if each is not None and each is not link:
                    each.say(f.frame(0, f.ACCEPT))

    def _let_accept(self, ahead_max: int) -> None:
        links = [link for link in self._links if link is not None and link.greeted]
        if not links:
            return
        least = min([len(link.clients) for link in links])
        for link in links:
            if not link.to_accept:
                continue
            if len(link.clients) - least <= ahead_max:
                link.say(f.count_frame(0, f.MORE, link.to_accept))
                link.to_accept = 0
            elif not self._catching_up.active:
                self._catching_up.start(self._let_accept, 1 << 30)

    def _open(self) -> None:
        if not self._opened and self._accepts:
            self._opened = True
            self._say(f.frame(0, f.ACCEPT))

    def stop_accepting(self) -> None:
        self._accepts = self._opened = False
        self._say(f.frame(0, f.STOP))

    def seen(self) -> list[tuple[int, int, int]]:
        """Returns of each front process its place, from 1 on, its pid, and the number of its clients."""
        pairs = enumerate(zip(self._processes, self._links, strict=True), 1)
        return [
            (place, process.pid, 0 if link is None else len(link.clients))
            for place, (process, link) in pairs
            if process is not None
        ]

    def finish(self) -> None:
        """Sends the replies to the clients that take them at once, and ends the fronts."""
        gevent.killall(self._keepers)
        self._catching_up.stop()
        self._catching_up.close()
        for link in self._links:
            if link is not None:
                link.finish()
        end_s = monotonic() + _END_S
        for link, process in zip(self._links, self._processes, strict=True):
            if process is None:
                continue
            try:
                process.wait(max(0.01, end_s - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if link is not None and not link.over.is_set():
                link.stop()

    def _say(self, frame: bytes) -> None:
        for link in self._links:
            if link is not None:
                link.say(frame)

    def _start(self, at: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            words = [str(one.fileno()) for one in (theirs, *self._listeners)]
            alone = ["alone"] if self._count == 1 else []
            pid = str(os.getpid())
            command = [sys.executable, "-I", "-S", "-c", _CODE, f"front of geventstalk {pid}", pid, *words, *alone]
            environment = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
            ours.setblocking(False)
            # They stay held back in the front, which ends with its link: a stop of all processes stops it, too.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_SIGNALS)
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno(), *(one.fileno() for one in self._listeners)],
                    env={**environment, _PATH: os.pathsep.join(map(os.path.abspath, sys.path))},
                    stdin=subprocess.DEVNULL,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            link = self._make_link(ours, self)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes[at] = process
        self._links[at] = link

    def _keep(self, at: int) -> None:
        """Starts a front again when it ends. Runs in a greenlet of its own."""
        rest_s = 0.0
        while True:
            link, process = self._links[at], self._processes[at]
            begun_s = monotonic()
            if link is not None and process is not None:
                link.over.wait()
                self._links[at] = None
                code = _end_of(process)
                self._processes[at] = None
                if not self._greeted:
                    self._fails(f"a front-end process ended at once, with exit code {code}")
                    return
                self._log.warning(
                    "front-end process %d ended, with exit code %d, and its clients are gone; another one is started",
                    process.pid,
                    code,
                )
                self.restarts += 1
                # A front that was to accept a connection and could not leaves it to the others.
                if self._opened:
                    self._say(f.frame(0, f.ACCEPT))
            rest_s = 0.0 if monotonic() - begun_s >= LIVED_S else min(max(RESTART_S, 2 * rest_s), RESTART_S_MAX)
            gevent.sleep(rest_s)
            try:
                self._start(at)
            except (OSError, MemoryError) as error:
                why = error.strerror if isinstance(error, OSError) else os.strerror(errno.ENOMEM)
                self._log.warning("cannot start a front-end process: %s", why)


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit code of a process whose link has ended. A process that does not end by itself is killed."""
    end_s = monotonic() + _END_S
    while process.poll() is None:
        if monotonic() > end_s:
            process.kill()
        gevent.sleep(0.005)
    return process.returncode
