"""The commands against a running server as processes: signals, terminals, completion, what is imported."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import greenstalk
import pytest

from geventstalk.exits import EXIT_USAGE
from tests.support.clients import until
from tests.support.live import Runner
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess, free_port


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all tests of this file."""
    started = ServerProcess(GEVENTSTALK)
    try:
        yield started.wait_ready()
    finally:
        started.stop()


@contextmanager
def process(*words: str, terminal: bool = False) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program, and what its output can be read from."""
    read, write = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    stdin = write if terminal else subprocess.PIPE
    child = subprocess.Popen(
        [*GEVENTSTALK, *words], env=environment, stdin=stdin, stdout=write, stderr=write, start_new_session=True
    )
    os.close(write)
    try:
        yield child, read
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()
        os.close(read)


def read_until(fd: int, text: bytes) -> bytes:
    """Returns what comes until this text has come, or the end."""
    found = b""
    with suppress(OSError):  # the end of a terminal
        while text not in found and (data := os.read(fd, 65536)):
            found += data
    return found


@pytest.mark.slow
def test_ctrl_c_says_how_far_it_came(server: ServerProcess) -> None:
    tube = "signals"
    with process("put", tube, "--lines", "-p", str(server.port)) as (child, output):
        assert child.stdin is not None
        child.stdin.write(b"job\n" * 50)
        child.stdin.flush()
        with greenstalk.Client(("127.0.0.1", server.port), use=tube) as client:
            until(lambda: client.stats_tube(tube)["total-jobs"] == 50, "50 jobs")
            child.send_signal(signal.SIGINT)
            assert child.wait(30) == 128 + signal.SIGINT
            assert read_until(output, b"\n").startswith(b"stopped: put 50 jobs into " + tube.encode() + b", ids ")
            assert client.stats_tube(tube)["total-jobs"] == 50
    with process("watch", tube, "-p", str(server.port)) as (child, output):
        read_until(output, b"\n")
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 128 + signal.SIGINT
        assert b"stopped; 0 events\n" in read_until(output, b"\xff")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["q", "\x03", "signal"])
def test_top_leaves_the_terminal_as_it_was(server: ServerProcess, end: str) -> None:
    with process("top", "-p", str(server.port), terminal=True) as (child, terminal):
        before = termios.tcgetattr(terminal)
        shown = read_until(terminal, b"q quit")
        assert not termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO)
        assert b"\x1b[?1049h" in shown and b"127.0.0.1:%d" % server.port in shown
        # Ctrl-C reaches only the foreground of a terminal that the process controls; here a signal stands for it.
        if end == "q":
            os.write(terminal, b"sq")
        else:
            child.send_signal(signal.SIGINT if end == "\x03" else signal.SIGTERM)
        shown = read_until(terminal, b"\xff")
        assert child.wait(30) == {"q": 0, "\x03": 130, "signal": 143}[end]
        assert b"\x1b[?1049l" in shown and b"\x1b[?25h" in shown
        assert b"Traceback" not in shown
        assert termios.tcgetattr(terminal) == before


def test_completion(server: ServerProcess, bare: Runner) -> None:
    tube = "completion"
    assert bare("put", tube, "x", "-p", str(server.port)).code == 0
    ran = bare("completion", "bash")
    assert (ran.code, ran.err) == (0, "") and "_GEVENTSTALK_COMPLETE=bash_complete" in ran.out
    assert bare("completion", "tcsh").code == EXIT_USAGE

    def answer(*words: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "_GEVENTSTALK_COMPLETE": "bash_complete"}
        environment |= {"COMP_WORDS": " ".join(["geventstalk", *words]), "COMP_CWORD": str(len(words))}
        done = subprocess.run(GEVENTSTALK, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == ""
        return [line.partition(",")[2] for line in done.stdout.splitlines() if line]

    assert answer("pause", "-p", str(server.port), tube[:-3]) == [tube]
    assert {"jobs", "job", "journal"} <= set(answer("jo"))
    assert answer("pause", "-p", str(free_port()), "x") == []
    assert answer("flush", tube, "--state", "ready,bu") == ["ready,buried"]
    here = ("kick", "-p", str(server.port))
    assert answer(*here, "tube:compl") == [f"tube:{tube}"]
    assert answer(*here, "tube:a,compl") == [f"tube:a,{tube}"]
    # bash splits words at colons.
    assert answer(*here, "tube", ":", "compl") == [tube]
    assert answer(*here, "state", ":") == ["ready", "delayed", "reserved", "buried"]
    assert answer(*here, "tube", ":", tube, "state", ":", "re,bu") == ["re,buried"]
    assert f"tube:{tube}" in answer(*here, "") and "state:buried" in answer(*here, "st")


# Bug: Commands piped into `head -1` ended with exit code 1, as if nothing had matched: click ends the process itself on
# a closed pipe.
@pytest.mark.slow
def test_a_stdout_that_takes_nothing_and_a_stdin_that_gives_nothing(server: ServerProcess) -> None:
    def ends(stdout: int, *words: str, stdin: int = subprocess.DEVNULL) -> tuple[int, bytes]:
        words = (*words, "-p", str(server.port))
        done = subprocess.run([*GEVENTSTALK, *words], cwd=ROOT, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        return done.returncode, done.stderr

    read, write = os.pipe()
    os.close(read)
    assert ends(write, "tubes") == (128 + signal.SIGPIPE, b""), "the reader is gone"
    os.close(write)
    full = os.open("/dev/full", os.O_WRONLY)
    assert ends(full, "tubes") == (1, b"geventstalk: cannot write to stdout: No space left on device\n")
    os.close(full)
    only_written = os.open(os.devnull, os.O_WRONLY)
    for lines in ((), ("--lines",)):
        code, error = ends(subprocess.DEVNULL, "put", "x", *lines, stdin=only_written)
        assert code == 1 and error.endswith(b"geventstalk: cannot read standard input: Bad file descriptor\n")
    os.close(only_written)


def test_python_without_a_tty_never_starts_rich(server: ServerProcess) -> None:
    script = (
        "import sys; from geventstalk.cli.main import main; code = main(sys.argv[1:]);"
        "unwanted = {'rich', 'gevent', 'sqlite3', 'yaml', 'geventstalk.core'};"
        "assert not unwanted & set(sys.modules); sys.exit(code)"
    )
    words = ["tubes", "-p", str(server.port)]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
