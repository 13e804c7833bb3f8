"""The commands against a running server, run in this process, and servers that misbehave."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from geventstalk.cli import program


class Ran(NamedTuple):
    """The outcome of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Returns what --json printed."""
        return [json.loads(line) for line in self.out.splitlines()]


class Runner:
    """Runs commands as the program does, without a process of their own. `words` come behind the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._words = words

    def to(self, *words: str) -> Runner:
        """The same with more words."""
        return Runner(self._capsys, self._monkeypatch, *self._words, *words)

    def __call__(self, command: str, *words: str, stdin: bytes = b"") -> Ran:
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            self._capsys.readouterr()
            code = program.main([command, *self._words, *words])
        return Ran(code, *self._capsys.readouterr())


@contextmanager
def answering(*answers: bytes | None) -> Iterator[int]:
    """The port of a server that sends these bytes, one for each time something comes; None is silence, b"" the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve() -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client:
            for answer in answers:
                if not client.recv(65536) or answer == b"":
                    return
                if answer is None:
                    break
                client.sendall(answer)
            ended.wait(30)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        ended.set()
        with socket.socket() as probe:  # so that `accept` returns also where no client came
            probe.connect_ex(listener.getsockname())
        listener.close()
        thread.join(30)


STATS = {
    **{f"current-jobs-{state}": 0 for state in ("urgent", "ready", "reserved", "delayed", "buried")},
    **dict.fromkeys(("cmd-reserve", "cmd-reserve-with-timeout", "cmd-delete", "cmd-release", "cmd-bury"), 0),
    **dict.fromkeys(("total-jobs", "job-timeouts", "max-job-size", "current-tubes", "uptime", "pid"), 1),
    **{f"current-{key}": 0 for key in ("connections", "producers", "workers", "waiting")},
    "total-connections": 1,
}


def answer_of(facts: Mapping[str, object]) -> bytes:
    """An answer to a question for statistics."""
    text = "---\n" + "".join(f"{key}: {value}\n" for key, value in facts.items())
    return b"OK %d\r\n%b\r\n" % (len(text), text.encode())
