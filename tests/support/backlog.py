"""A backlog far larger than `--max-memory`: put, killed, restarted, stopped, restarted, and taken out, all compared.

    python -m tests.support.backlog --jobs 1000000 --size 10000 --max-memory 256m    (runs this tree, whatever build)

It says beforehand what the server may take: the bound, what a job takes beside its body, and what the process takes
without jobs. Exit code 0 only when the resident size stayed below that all along, starts included, and each job came
out once and as it was put.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client

BATCH = 32
"""This many commands are under way at once."""
UNITS = {"k": 10, "m": 20, "g": 30}
KEPT_BYTES = {"compiled": 260, "pure": 520}
"""The most that a job takes beside its body."""
BASE_BYTES = 64 << 20
"""The most that the process takes without jobs, with its threads and with bodies that are on their way."""
START_LIMIT_S = 1800.0
REFUSED_LIMIT_S = 60.0


class Exceeded(AssertionError):
    """The server took more than it may, or lost something."""


def body_of(number: int, size: int) -> bytes:
    """A body that is another's for each number, and tells its number."""
    return b"%016d" % number + random.Random(number).randbytes(size - 16)


def resident(pid: int) -> tuple[int, int]:
    """Returns how much the process has now, and how much it ever had, in bytes."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, most = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


def has_read(pid: int) -> tuple[int, int]:
    """Returns how many bytes the process has read, and how many of them came from a device."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def processor_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def drop_from_cache(folder: Path) -> None:
    """The system forgets what it has of these files in memory."""
    for path in [*folder.glob("*.db")]:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


class Backlog:
    """One run in a folder. `say` takes lines for people."""

    def __init__(
        self,
        folder: Path,
        *,
        jobs: int,
        size: int,
        max_memory: int,
        flags: Sequence[str] = (),
        cold: bool = False,
        rest_s: float = 0.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._journal = folder / "journal"
        self._flags = ["-b", str(self._journal), "--max-memory", str(max_memory), *flags]
        self._jobs = jobs
        self._size = size
        self._cold = cold
        self._rest_s = rest_s
        self._say = say
        self._ids = array("q")  # of the jobs, by their numbers
        self._may_take = 0
        self._max_memory = max_memory
        self._server: ServerProcess | None = None

    def run(self) -> None:
        """Raises Exceeded."""
        try:
            self._start("start without jobs")
            self._state_bound()
            self._put()
            self._end("kill -9", ServerProcess.kill)
            self._start("start after it")
            self._end("SIGTERM", ServerProcess.stop)
            self._start("start after it")
            self._take()
            self._end("SIGTERM", ServerProcess.stop)
        finally:
            if self._server is not None:
                self._server.stop()

    def _state_bound(self) -> None:
        with Client(self._running.connect()) as client:
            build = client.stats(b"stats")["build"].strip('"')
        kept = KEPT_BYTES[build]
        self._may_take = self._max_memory + self._jobs * kept + BASE_BYTES
        self._say(
            f"{self._jobs} jobs of {self._size} bytes, {build} build: it may take {_mib(self._may_take)}, namely "
            f"{_mib(self._max_memory)} for bodies, {_mib(self._jobs * kept)} for {kept} bytes a job, {_mib(BASE_BYTES)}"
        )

    @property
    def _running(self) -> ServerProcess:
        assert self._server is not None
        return self._server

    def _start(self, what: str) -> None:
        if self._cold and self._journal.exists():
            drop_from_cache(self._journal)
        begun_s = time.monotonic()
        self._server = ServerProcess([*GEVENTSTALK], self._flags).wait_ready(START_LIMIT_S)
        took_s = time.monotonic() - begun_s
        pid = self._server.pid
        now, most = resident(pid)
        read, from_device = has_read(pid)
        self._say(
            f"{what}: {took_s:.2f} s, {processor_s(pid):.2f} s of processor time, read {_mib(read)}, of it "
            f"{_mib(from_device)} from the device; resident {_mib(now)}, at most {_mib(most)}"
        )
        self._check(most, what)

    def _end(self, what: str, end: Callable[[ServerProcess], object]) -> None:
        begun_s = time.monotonic()
        end(self._running)
        self._server = None
        self._say(f"{what}: the end took {time.monotonic() - begun_s:.2f} s")

    def _check(self, most: int, what: str) -> None:
        if self._may_take and most > self._may_take:
            raise Exceeded(f"{what}: it took {_mib(most)}, and may take {_mib(self._may_take)}")

    def _look(self, what: str, done: int) -> None:
        now, most = resident(self._running.pid)
        self._check(most, what)
        if done * 10 // self._jobs != (done - BATCH) * 10 // self._jobs:
            self._say(f"  {what} {done}: resident {_mib(now)}, at most {_mib(most)}")

    def _put(self) -> None:
        begun_s = time.monotonic()
        refused = 0
        todo = list(range(self._jobs - 1, -1, -1))
        ids = self._ids = array("q", bytes(8 * self._jobs))
        done = 0
        with Client(self._running.connect()) as client:
            while todo:
                some = [todo.pop() for _ in range(min(BATCH, len(todo)))]
                client.send(b"".join([_put_of(number, self._size) for number in some]))
                again = []
                for number in some:
                    said = client.reply()
                    if said == b"OUT_OF_MEMORY\r\n":
                        again.append(number)
                    else:
                        ids[number] = int(said.removeprefix(b"INSERTED "))
                        done += 1
                todo += reversed(again)
                refused += len(again)
                if again:
                    time.sleep(0.002)
                    if time.monotonic() - begun_s > REFUSED_LIMIT_S and refused > 10 * self._jobs:
                        raise Exceeded(f"{refused} puts were refused, {done} taken")
                else:
                    self._look("put", done)
            figures = client.stats(b"stats")
        took_s = time.monotonic() - begun_s
        used_s = processor_s(self._running.pid)
        self._say(
            f"put all in {took_s:.1f} s, {used_s:.1f} s of processor time, {refused} refused and put again; "
            f"in memory {figures['memory-bytes']} bytes, on disk {figures['memory-bytes-on-disk']}"
        )

    def _take(self) -> None:
        begun_s, begun_processor_s = time.monotonic(), processor_s(self._running.pid)
        done = 0
        seen = bytearray(self._jobs)
        with Client(self._running.connect()) as client:
            while done < self._jobs:
                some = min(BATCH, self._jobs - done)
                client.send(b"reserve-with-timeout 0\r\n" * some)
                found = [self._check_job(client.reply(), seen) for _ in range(some)]
                client.send(b"".join([b"delete %d\r\n" % id for id in found]))
                for _ in found:
                    if (said := client.reply()) != b"DELETED\r\n":
                        raise Exceeded(f"a delete was answered {said!r}")
                done += some
                self._look("taken", done)
            said = client.ask(b"reserve-with-timeout 0")
            if said != b"TIMED_OUT\r\n" or not all(seen):
                raise Exceeded(f"{seen.count(0)} jobs are gone, then: {said[:80]!r}")
            took_s = time.monotonic() - begun_s
            took_processor_s = processor_s(self._running.pid) - begun_processor_s
            self._say(f"took all in {took_s:.1f} s, {took_processor_s:.1f} s of processor time; each as it was put")
            time.sleep(self._rest_s)
            now, most = resident(self._running.pid)
            self._say(f"resident in the end {_mib(now)}, at most {_mib(most)}")

    def _check_job(self, reply: bytes, seen: bytearray) -> int:
        head, _, rest = reply.partition(b"\r\n")
        words = head.split()
        if words[:1] != [b"RESERVED"]:
            raise Exceeded(f"a reserve was answered {head!r}")
        id, number = int(words[1]), int(rest[:16])
        if rest != body_of(number, self._size) + b"\r\n" or self._ids[number] != id or seen[number]:
            raise Exceeded(f"job {id} is not the job that was put, or came twice")
        seen[number] = 1
        return id


def _put_of(number: int, size: int) -> bytes:
    return b"put 0 0 600 %d\r\n%b\r\n" % (size, body_of(number, size))


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _bytes(text: str) -> int:
    unit = text[-1].lower()
    return int(text[:-1]) << UNITS[unit] if unit in UNITS else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=10_000, help="bytes of a body, at least 16")
    parser.add_argument("--max-memory", type=_bytes, default=10 << 20, help="such as 256m")
    parser.add_argument("--folder", type=Path, help="where the journal is made and removed")
    parser.add_argument("--cold", action="store_true", help="each start reads from the device")
    parser.add_argument("flags", nargs="*", help="more flags for the server, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        run = Backlog(
            Path(folder),
            jobs=given.jobs,
            size=given.size,
            max_memory=given.max_memory,
            flags=given.flags,
            cold=given.cold,
            rest_s=12,  # within this long memory goes back to the system
            say=lambda line: print(line, flush=True),
        )
        try:
            run.run()
        except Exceeded as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
