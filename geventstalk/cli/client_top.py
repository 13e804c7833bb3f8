"""geventstalk top: the server and its tubes, live in the terminal.

A thread sends the requests, so that keys and resizing work while the server is slow. A file or a pipe gets plain lines.
Invariant: however the command ends, it restores the terminal.
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

from geventstalk.cli.client import Context, client_command, plural
from geventstalk.cli.client_show import Column, age, colours, count, cut, facts_line, rate, size, table, time_of, width
from geventstalk.cli.client_tubes import STATE_COLUMNS, oldest, paused, state_cells
from geventstalk.cli.params import Number, Whole
from geventstalk.exits import EXIT_OK
from geventstalk.logs import one_line
from geventstalk.remote.address import Address
from geventstalk.remote.errors import ClientError
from geventstalk.remote.protocol import Beanstalk
from geventstalk.remote.sampling import Sample, take
from geventstalk.remote.shapes import Shape

if TYPE_CHECKING:
    from rich.console import RenderableType

_TICK_S: Final = 0.2
"""The delay until a new size of the terminal is noticed."""
_ROWS_LEAST: Final = 5
"""On a low terminal, lines about the server are left out until this many lines are left for tubes, ..."""
_HEAD_LEAST: Final = 2
"""... except for these."""
_HEIGHT_WITH_GAPS: Final = 16
"""The least height of a terminal with empty lines between the parts."""
SORTS: Final = ("trouble", "name", "ready", "buried", "in", "out")
_COLUMNS: Final = (
    Column("TUBE", flexible=True),
    *STATE_COLUMNS,
    Column("IN/S", right=True, rank=1),
    Column("OUT/S", right=True, rank=1),
    Column("OLDEST", right=True, rank=1),
    Column("WATCHING", right=True, rank=3),
    Column("WAITING", right=True, rank=5),
    Column("PAUSED", right=True, rank=3),
    Column("WHY", flexible=True, rank=2),
)


@client_command("top")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=Number(0.2, 3600),
    default=2.0,
    help="Seconds between two looks. Default: 2.",
)
@click.option("--count", "most", metavar="N", type=Whole(1), help="End after N looks.")
@click.option("--sort", type=click.Choice(SORTS), default=SORTS[0], help="The worst tube first, or the largest.")
def top(context: Context, interval: float, most: int | None, sort: str) -> int:
    """Show the server and its tubes live.

    Keys: q ends, s sorts otherwise, space holds the picture. Rates are a second, since the last look. A look asks for
    each tube, so that it takes longer with many tubes; then there are fewer looks. Over the protocol, for any
    beanstalkd. Where stdout is not a terminal, each look is printed, and without --count there is one.
    """
    if context.json or not _is_screen():
        return _plain(context, interval, most or 1, sort)
    return _screen(context, interval, most, sort)


def _is_screen() -> bool:
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def _plain(context: Context, interval: float, most: int, sort: str) -> int:
    sample: Sample | None = None
    for at in range(most):
        if sample is not None:
            time.sleep(sample.rest_s(interval))
        sample = take(context.server, sample)
        if context.json:
            context.write({"server": sample.server, "tubes": sample.tubes})
            continue
        if at:
            click.echo()
        head, tubes = lines(context.address, sample, sort, width())
        for line in (*head, "", *tubes):
            click.echo(line)
    return EXIT_OK


# The picture


def lines(
    server: Address, sample: Sample, sort: str, room: int | None, height: int | None = None
) -> tuple[list[str], list[str]]:
    """Returns the lines about the server, and the table of its tubes. `height` is the most lines of both together."""
    head = _head(server, sample, room)
    tubes = sorted(sample.tubes, key=_ORDERS[sort])
    shown = len(tubes)
    if height is not None:
        head = head[: max(_HEAD_LEAST, height - 1 - min(shown, _ROWS_LEAST))]
        left = height - len(head) - 1
        if shown > left:
            shown = max(0, left - 1)
    rows = table(_COLUMNS, [_row(tube) for tube in tubes[:shown]], room)
    if shown < len(tubes):
        rows.append(f"and {plural(len(tubes) - shown, 'more tube')}")
    return head, rows


def _head(at: Address, sample: Sample, room: int | None) -> list[str]:
    """Returns the lines about the server, the most important first."""
    server: dict[str, Any] = sample.server
    jobs, clients, rates = server["jobs"], server["connections"], server["per_s"] or {}
    build = f" ({server['build']})" if "build" in server else ""
    title = [(f"version {server['version']}{build}", 2), (f"up {age(server['uptime_s'])}", 1)]
    if server["draining"]:
        title.append(("DRAINING: puts are refused", 0))
    states = (("ready", 0), ("reserved", 1), ("delayed", 2), ("buried", 0), ("urgent", 3))
    speeds = (("put", 0), ("reserve", 1), ("delete", 0), ("timeout", 2))
    facts = [
        ("jobs", [(f"{count(jobs[state])} {state}", rank) for state, rank in states]),
        ("a second", [(f"{name} {rate(rates.get(name))}", rank) for name, rank in speeds]),
    ]
    if latency := server.get("latency"):
        queued, worked = (_quantiles(latency[part]) for part in ("queued", "worked"))
        times = (f"queued {queued[0]}", *queued[1:], f"at work {worked[0]}", *worked[1:])
        facts.append(("times", list(zip(times, (0, 1, 2, 1, 1, 2), strict=True))))
    if memory := server.get("memory"):
        facts.append(("bodies", _bodies(memory["bodies"])))
    peers = [
        (count(clients["open"]), 0),
        (plural(clients["producers"], "producer"), 2),
        (plural(clients["workers"], "worker"), 1),
        (f"{count(clients['waiting'])} waiting", 1),
        (plural(server["tubes"], "tube"), 2),
    ]
    facts.append(("clients", peers))
    head = [facts_line(str(at), title, room)]
    return [one_line(line) for line in head + [facts_line(label, parts, room) for label, parts in facts]]


def _bodies(bodies: dict[str, int]) -> list[tuple[str, int]]:
    facts = [
        (f"{size(bodies['bytes'])} of {size(bodies['max_bytes'])} in memory", 0),
        (f"{size(bodies['bytes_on_disk'])} on disk", 0),
        (plural(bodies["jobs_on_disk"], "job") + " there", 2),
        (f"{count(bodies['loads'])} came back", 3),
    ]
    refused = bodies["refused_puts"]
    return [*facts, (plural(refused, "put") + " refused", 1)] if refused else facts


def _quantiles(times: Shape) -> list[str]:
    return [f"{name} {time_of(times[name])}" for name in ("p50", "p95", "p99")]


def _row(tube: Shape) -> list[str]:
    rates = tube["per_s"] or {}
    return [
        tube["name"],
        *state_cells(tube),
        rate(rates.get("put")),
        rate(rates.get("delete")),
        age(oldest(tube)),
        count(tube["watching"]),
        count(tube["waiting"]),
        paused(tube),
        tube["trouble"]["why"],
    ]


def _by(key: Callable[[Shape], float]) -> Callable[[Shape], tuple[Any, ...]]:
    return lambda tube: (-key(tube), tube["name"])


_ORDERS: Final[dict[str, Callable[[Shape], tuple[Any, ...]]]] = {
    "trouble": _by(lambda tube: tube["trouble"]["score"]),
    "name": lambda tube: (tube["name"],),
    "ready": _by(lambda tube: tube["jobs"]["ready"]),
    "buried": _by(lambda tube: tube["jobs"]["buried"]),
    "in": _by(lambda tube: (tube["per_s"] or {}).get("put", 0)),
    "out": _by(lambda tube: (tube["per_s"] or {}).get("delete", 0)),
}


# The screen


class _Asking:
    """A thread that takes samples. `sample` is the latest, `problem` is the reason why there is no newer one."""

    def __init__(self, context: Context, interval: float, sample: Sample) -> None:
        self.sample = sample
        self.problem: str | None = None
        self.looks = 1
        self.fault: BaseException | None = None
        self._context: Final = context
        self._interval: Final = interval
        self._thread: Final = threading.Thread(target=self._run, daemon=True, name="asking")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        server: Beanstalk | None = self._context.server
        wait = self.sample.rest_s(self._interval)
        while True:
            time.sleep(wait)
            try:
                server = server or self._context.another()
                self.sample = take(server, self.sample)
                self.problem = None
                self.looks += 1
                wait = self.sample.rest_s(self._interval)
            except ClientError as error:
                self.problem = str(error)
                if server is not None:
                    server.close()
                    server = None
                wait = self._interval
            except BaseException as error:
                self.fault = error
                return


class _Screen:
    """The content of the screen, and the state that keys change."""

    def __init__(self, context: Context, asking: _Asking, sort: str) -> None:
        self._context: Final = context
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
        """A value that changes when the picture does."""
        return (id(self._held or self._asking.sample), self._asking.problem, self._sort, bool(self._held), _size())

    def picture(self) -> RenderableType:
        from rich.text import Text

        room, height = _size()
        sample = self._held or self._asking.sample
        gap = [""] if height >= _HEIGHT_WITH_GAPS else []
        head, tubes = lines(self._context.address, sample, self._sort, room, height - 1 - 2 * len(gap))
        titles = len(head) + len(gap)
        text = Text(no_wrap=True, overflow="crop", end="")
        for at, line in enumerate([*head, *gap, *tubes]):
            text.append(line + "\n", style="bold" if at in (0, titles) and colours() else "")
        text.append("\n" * max(0, height - titles - len(tubes) - 1))
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


def _screen(context: Context, interval: float, most: int | None, sort: str) -> int:
    from rich.console import Console
    from rich.live import Live as Picture

    asking = _Asking(context, interval, take(context.server, None))
    screen = _Screen(context, asking, sort)
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
    """Returns a function that waits for keys for some seconds. The terminal does not echo them."""
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
    """Returns whether Ctrl-Z was typed since the last call."""
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
