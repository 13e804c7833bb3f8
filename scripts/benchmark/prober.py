"""A client that asks for next to nothing all the time: python -m scripts.benchmark.prober PORT PID...

Prints one line of JSON when its input ends: how many requests it made, and how long they waited. It is a process of its
own, with a higher priority than the load on its core where the system allows that, so that it measures the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scripts.benchmark.load import Client, LoadError
from scripts.benchmark.servers import ROOT

PRIORITY = -15
PAUSE_S = 0.0003


@dataclass
class Waits:
    """Milliseconds that requests waited. `net` is without the time in which both were ready to run and others ran."""

    requests: int = 0
    p50_ms: float = 0.0
    p999_ms: float = 0.0
    worst_ms: float = 0.0
    net_p999_ms: float = 0.0
    net_worst_ms: float = 0.0


@contextlib.contextmanager
def probing(port: int, *pids: int) -> Iterator[Waits]:
    """Probes a server of these processes while the block runs; the waits are known after it."""
    command = [sys.executable, "-m", "scripts.benchmark.prober", str(port), *map(str, pids)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    waits = Waits()
    try:
        process.stdout.readline()  # it has begun
        yield waits
        process.stdin.close()
        summary = process.stdout.readline()
        if not summary:
            raise LoadError("the prober got no answer")
        waits.__dict__.update(json.loads(summary))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _kept_waiting(files: Sequence[int]) -> int:
    """Nanoseconds for which the processes waited for a processor, up to now."""
    return sum(int(os.pread(file, 100, 0).split()[1]) for file in files)


def main() -> int:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    files = [os.open(f"/proc/{process}/schedstat", os.O_RDONLY) for process in (*sys.argv[2:], "self")]
    waits: list[float] = []
    net: list[float] = []
    clock = time.perf_counter
    with Client(int(sys.argv[1])) as client:
        client.ask(b"list-tube-used\r\n", b"USING")
        print("ready", flush=True)
        checked = clock()
        while True:
            kept_ns = _kept_waiting(files)
            begun = clock()
            client.ask(b"list-tube-used\r\n", b"USING")
            waits.append((clock() - begun) * 1000)
            net.append(max(0.0, waits[-1] - (_kept_waiting(files) - kept_ns) / 1e6))
            time.sleep(PAUSE_S)
            if clock() - checked > 0.05:
                checked = clock()
                if select.select([sys.stdin], [], [], 0)[0]:
                    break
    waits.sort()
    net.sort()
    rare = int(len(waits) * 0.999)
    summary = Waits(len(waits), waits[len(waits) // 2], waits[rare], waits[-1], net[rare], net[-1])
    print(json.dumps(summary.__dict__), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
