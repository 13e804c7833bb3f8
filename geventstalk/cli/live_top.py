"""geventstalk top: the server and its tubes, live in the terminal.

A thread asks the server, so that keys and resizing work while the server is slow. What is not a terminal gets plain
lines. Invariant: whatever ends the command, the terminal is as it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from geventstalk.cli.live import Live, live_command, plural
from geventstalk.cli.live_show import Column, age, colours, count, cut, rate, table, time_of, width
from geventstalk.cli.live_tubes import oldest, paused
from geventstalk.exits import EXIT_OK
from geventstalk.live.errors import LiveError
from geventstalk.live.protocol import Server
from geventstalk.live.sampling import Sample, take, trouble
from geventstalk.live.shapes import Shape
from geventstalk.logs import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

_TICK_S: Final = 0.2
"""How soon a new size of the terminal is noticed."""
SORTS: Final = ("trouble", "name", "ready", "buried", "in", "out")
_COLUMNS: Final = (
    Column("TUBE", flexible=True),
    Column("READY", right=True),
    Column("RESERVED", right=True, rank=2),
    Column("DELAYED", right=True, rank=4),
    Column("BURIED", right=True),
    Column("IN/S", right=True, rank=1),
    Column("OUT/S", right=True, rank=1),
    Column("OLDEST", right=True, rank=1),
    Column("WATCHING", right=True, rank=3),
    Column("WAITING", right=True, rank=5),
    Column("PAUSED", right=True, rank=3),
)


@live_command("top")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    help="Seconds between two looks. Default: 2.",
)
@click.option("--count", "most", metavar="N", type=click.IntRange(1), help="End after so many looks.")
@click.option("--sort", type=click.Choice(SORTS), default=SORTS[0], help="The worst tube first, or the largest.")
def top(live: Live, interval: float, most: int | None, sort: str) -> int:
    """Show the server and its tubes live.

    Keys: q ends, s sorts otherwise, space holds the picture. Rates are a second, since the last look. A look asks for
    each tube, so that it takes longer with many tubes; then there are fewer looks. Over the protocol, for any
    beanstalkd. Where stdout is not a terminal, each look is printed, and without --count there is one.
    """
    if live.json or not _is_screen():
        return _plain(live, interval, most or 1, sort)
    return _screen(live, interval, most, sort)


def _is_screen() -> bool:
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def _plain(live: Live, interval: float, most: int, sort: str) -> int:
    sample: Sample | None = None
    for at in range(most):
        if sample is not None:
            time.sleep(sample.rest_s(interval))
        sample = take(live.server, sample)
        if live.json:
            live.write({"server": sample.server, "tubes": sample.tubes})
            continue
        if at:
            click.echo()
        for line in _lines(live, sample, sort, width(), None):
            click.echo(line)
    return EXIT_OK


# The picture


def _lines(live: Live, sample: Sample, sort: str, room: int | None, height: int | None) -> list[str]:
    """The picture, titles of the table behind the first empty line. `height` is how many lines there may be."""
    lines = [cut(line, room) if room else line for line in _head(live, sample)]
    tubes = sorted(sample.tubes, key=_ORDERS[sort])
    shown = len(tubes)
    if height is not None and len(lines) + 2 + shown > height:
        shown = max(0, height - len(lines) - 3)
    lines += ["", *table(_COLUMNS, [_row(tube) for tube in tubes[:shown]], room)]
    if shown < len(tubes):
        lines.append(f"and {plural(len(tubes) - shown, 'more tube')}")
    return lines


def _head(live: Live, sample: Sample) -> list[str]:
    server: dict[str, Any] = sample.server
    jobs, clients, rates = server["jobs"], server["connections"], server["per_s"] or {}
    draining = "   DRAINING: puts are refused" if server["draining"] else ""
    build = f" ({server['build']})" if "build" in server else ""
    states = "   ".join(f"{count(jobs[state])} {state}" for state in ("ready", "reserved", "delayed", "buried"))
    speeds = "   ".join(f"{name} {rate(rates.get(name))}" for name in ("put", "reserve", "delete", "timeout"))
    tubes = plural(server["tubes"], "tube")
    workers = f"{plural(clients['producers'], 'producer')}   {plural(clients['workers'], 'worker')}"
    head = [
        f"{live.address}   version {server['version']}{build}   up {age(server['uptime_s'])}{draining}",
        f"jobs      {states}   {count(jobs['urgent'])} urgent",
        f"a second  {speeds}",
        f"clients   {count(clients['open'])}   {workers}   {count(clients['waiting'])} waiting   {tubes}",
    ]
    if latency := server.get("latency"):
        times = ((name, latency[part]) for name, part in (("queued", "queued"), ("at work", "worked")))
        head.insert(3, "times     " + "      ".join(f"{name}  {_quantiles(found)}" for name, found in times))
    return [one_line(line) for line in head]


def _quantiles(times: Shape) -> str:
    return "   ".join(f"{name} {time_of(times[name])}" for name in ("p50", "p95", "p99"))


def _row(tube: Shape) -> list[str]:
    jobs, rates = tube["jobs"], tube["per_s"] or {}
    return [
        tube["name"],
        *[count(jobs[state]) for state in ("ready", "reserved", "delayed", "buried")],
        rate(rates.get("put")),
        rate(rates.get("delete")),
        age(oldest(tube)),
        count(tube["watching"]),
        count(tube["waiting"]),
        paused(tube),
    ]


def _by(key: Callable[[Shape], float]) -> Callable[[Shape], tuple[Any, ...]]:
    return lambda tube: (-key(tube), tube["name"])


_ORDERS: Final[dict[str, Callable[[Shape], tuple[Any, ...]]]] = {
    "trouble": lambda tube: (*(-part for part in trouble(tube)), tube["name"]),
    "name": lambda tube: (tube["name"],),
    "ready": _by(lambda tube: tube["jobs"]["ready"]),
    "buried": _by(lambda tube: tube["jobs"]["buried"]),
    "in": _by(lambda tube: (tube["per_s"] or {}).get("put", 0)),
    "out": _by(lambda tube: (tube["per_s"] or {}).get("delete", 0)),
}


# The screen


class _Asking:
    """A thread that asks the server. `sample` is the latest answer, `problem` why there is no newer one."""

    def __init__(self, live: Live, interval: float, sample: Sample) -> None:
        self.sample = sample
        self.problem: str | None = None
        self.looks = 1
        self.fault: BaseException | None = None
        self._live: Final = live
        self._interval: Final = interval
        self._thread: Final = threading.Thread(target=self._run, daemon=True, name="asking")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        server: Server | None = self._live.server
        wait = self.sample.rest_s(self._interval)
        while True:
            time.sleep(wait)
            try:
                server = server or self._live.another()
                self.sample = take(server, self.sample)
                self.problem = None
                self.looks += 1
                wait = self.sample.rest_s(self._interval)
            except LiveError as error:
                self.problem = str(error)
                if server is not None:
                    server.close()
                    server = None
                wait = self._interval
            except BaseException as error:
                self.fault = error
                return


class _Screen:
    """What is on the screen, and what the keys changed about it."""

    def __init__(self, live: Live, asking: _Asking, sort: str) -> None:
        self._live: Final = live
        self._asking: Final = asking
        self._sort = sort
        self._held: Sample | None = None

    def key(self, key: str) -> bool:
        """Takes a key. Returns whether it ends the command."""
        if key == "s":
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        elif key == " ":
            self._held = None if self._held else self._asking.sample
        return key in ("q", "Q", "\x04")

    def state(self) -> object:
        """Changes when the picture does."""
        return (id(self._held or self._asking.sample), self._asking.problem, self._sort, bool(self._held), _size())

    def picture(self) -> RenderableType:
        from rich.text import Text

        room, height = _size()
        sample = self._held or self._asking.sample
        lines = _lines(self._live, sample, self._sort, room, height - 2)
        titles = lines.index("") + 1
        text = Text(no_wrap=True, overflow="crop", end="")
        for at, line in enumerate(lines):
            text.append(line + "\n", style="bold" if at in (0, titles) and colours() else "")
        text.append("\n" * max(0, height - len(lines) - 1))
        text.append(cut(self._foot(), room), style="reverse" if colours() else "")
        return text

    def _foot(self) -> str:
        if self._asking.problem is not None:
            return one_line(f"{self._asking.problem}; trying again")
        held = "held" if self._held else "hold"
        return f"q quit   s sort: {self._sort}   space {held}"


def _size() -> tuple[int, int]:
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 80, 24
    return max(20, size.columns), max(6, size.lines)


def _screen(live: Live, interval: float, most: int | None, sort: str) -> int:
    from rich.console import Console
    from rich.live import Live as Picture

    asking = _Asking(live, interval, take(live.server, None))
    screen = _Screen(live, asking, sort)
    asking.start()
    with _keys() as keys, _stop_key() as stop_key:
        console = Console(highlight=False)
        picture = Picture(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        shown: object = None
        with picture:
            while most is None or asking.looks <= most:
                if asking.fault is not None:
                    raise asking.fault
                if (state := screen.state()) != shown:
                    shown = state
                    picture.update(screen.picture(), refresh=True)
                if any(screen.key(key) for key in keys(_TICK_S)):
                    break
                if stop_key():
                    picture.stop()
                    os.kill(os.getpid(), signal.SIGSTOP)
                    picture.start(refresh=False)
                    shown = None
    return EXIT_OK


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], Sequence[str]]]:
    """A function that waits so long for keys, which are not shown while they are typed."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read(wait_s: float) -> Sequence[str]:
        try:
            if termios.tcgetattr(fd)[3] & termios.ICANON:
                tty.setcbreak(fd)  # a shell took the terminal back while this process was stopped
            ready, _, _ = select.select([fd], [], [], wait_s)
            data = os.read(fd, 64) if ready else None
        except (termios.error, OSError):
            data = b""
        return "" if data is None else data.decode("ascii", "replace") or "q"  # the terminal may be gone

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _stop_key() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-Z was typed since the last time."""
    typed = []
    before = signal.signal(signal.SIGTSTP, lambda *_: typed.append(True))

    def was_typed() -> bool:
        found = bool(typed)
        typed.clear()
        return found

    try:
        yield was_typed
    finally:
        signal.signal(signal.SIGTSTP, before)
