"""scripts/run in a clone: it compiles, says what it does, and never starts anything but the clone's sources."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest

from scripts.build import BUSY, EXPECTED_S, NO_NETWORK, NO_ROOM, Progress
from tests.clients.programs import missing
from tests.support.clients import until
from tests.support.compiled import (
    PACKAGES,
    check_compiled,
    clone,
    compiled_modules,
    has_compiler,
    put_on,
    wheel_names,
    when_the_build_changed,
)
from tests.support.disk import small_disk
from tests.support.process import ROOT, ServerProcess, free_port

MAKE_LIMIT_S = 180
"""An environment takes some ten seconds, a compiled one with a compiler that does not optimise half a minute."""
PURE = {"GEVENTSTALK_COMPILE": "0"}
QUICKLY = {"CFLAGS": "-O0"}
NO_COMPILER = {"CC": "/nowhere/cc"}
UNPLUGGED = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
COMPILED_LAYERS = [
    *(f"tests/test_{name}.py" for name in ("engine", "engine_model", "order", "job_table", "journal_format")),
    *(f"tests/test_{name}.py" for name in ("liveness", "protocol", "records", "segment", "session", "store")),
    *(f"tests/test_{name}.py" for name in ("signals", "timerwheel")),
    "tests/test_offline.py::test_reading_changes_nothing",
]
"""What takes seconds in all, and reaches every compiled module."""

pytestmark = pytest.mark.timeout(2 * MAKE_LIMIT_S)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns what a user has, and this: without what the tests' own environment says to Python."""
    without = ("PYTHONPATH", "GEVENTSTALK_COMPILE", "PYTHON", "CC", "CFLAGS")
    return {**{key: value for key, value in os.environ.items() if key not in without}, **more}


def said(
    tree: Path, more: Mapping[str, str] = MappingProxyType({}), code: int = 0, waits: bool = False
) -> tuple[str, list[str]]:
    """Returns what `scripts/run -v` writes to standard output, and its lines on standard error."""
    done = subprocess.run(
        [tree / "scripts" / "run", *["--compiled"] * waits, "-v"],
        cwd="/",
        env=environment(more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MAKE_LIMIT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def marks(tree: Path) -> set[tuple[str, int]]:
    """Returns what changes when an environment is made or refreshed."""
    return {(str(path), path.stat().st_mtime_ns) for path in tree.glob(".venv*/made*")}


def is_ready(tree: Path) -> bool:
    """Returns whether a start would take the compiled build as it is."""
    program = f'root={shlex.quote(str(tree))}; . "$root/scripts/places.sh"; compiled_is_ready "$(compiled_mark)"'
    return subprocess.run(["sh", "-c", program], env=environment({}), timeout=20, check=False).returncode == 0


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("run") / "a clone")


@pytest.fixture
def tree(spaced: Path) -> Path:
    """A clone in a folder whose name has a space, the same for all tests that build on each other."""
    return spaced


@when_the_build_changed
@pytest.mark.slow
class TestPure:
    """GEVENTSTALK_COMPILE=0. One test builds on the other."""

    def start(self, tree: Path, cwd: Path) -> ServerProcess:
        """Starts a server with a journal in ./data; not yet ready."""
        program = [str(tree / "scripts" / "run")]
        return ServerProcess(program, ["-b", "./data"], cwd=cwd, stderr=cwd / "log", env=PURE)

    def test_makes_its_environment_even_twice_at_once(self, tree: Path, tmp_path: Path) -> None:
        (tree / ".venv" / "bin").mkdir(parents=True)  # what a run left that was killed half-way
        (tree / ".venv" / "bin" / "python").symlink_to("/bin/false")
        places = [tmp_path / "one", tmp_path / "two"]
        servers = []
        for place in places:
            place.mkdir()
            servers.append(self.start(tree, place))
        try:
            for server in servers:
                server.wait_ready(MAKE_LIMIT_S)
        finally:
            codes = [server.stop() for server in servers]
        assert codes == [0, 0]
        assert all(any((place / "data").iterdir()) for place in places)
        logs = "".join((place / "log").read_text() for place in places)
        assert logs.count(" 0 s: making an environment") == 1, logs
        assert logs.count("waiting for another start") == 1, logs
        assert not (tree / "data").exists()

    def test_starts_again_without_making_anything(self, tree: Path) -> None:
        before = marks(tree)
        assert before, "runs after the test that makes the environment"
        version, errors = said(tree, PURE)
        assert (version[-7:], errors, marks(tree)) == (" (pure)", [], before)

    def test_notices_a_changed_setup(self, tree: Path) -> None:
        before = marks(tree)
        with (tree / "setup.py").open("a") as setup:
            setup.write("# changed\n")
        assert said(tree, PURE)[1]
        assert marks(tree) != before
        assert not said(tree, PURE)[1]

    def test_another_python_is_not_taken_for_the_wanted_one(self, tree: Path) -> None:
        assert not said(tree, {**PURE, "PYTHON": sys.executable})[1]
        _, (error,) = said(tree, {**PURE, "PYTHON": "/nowhere/python"}, 1)
        assert "at PYTHON=/nowhere/python" in error


@when_the_build_changed
@pytest.mark.slow
class TestNotCompiled:
    """The causes that prevent the compiled build, when the pure one is there. These follow the tests above."""

    def test_without_a_compiler_it_is_pure_and_says_what_is_missing(self, tree: Path) -> None:
        assert (tree / ".venv" / "made-for-run").exists(), "runs after the tests of the pure build"
        version, errors = said(tree, NO_COMPILER, waits=True)
        assert version.endswith(" (pure)")
        assert "starting the pure build, the slower one: no C compiler: " in errors[-1]
        assert "apt-get install gcc" in errors[-1]
        before = marks(tree)
        version, again = said(tree, NO_COMPILER)
        assert (version[-7:], again, marks(tree)) == (" (pure)", errors[-1:], before)

    def test_it_is_an_error_where_it_must_be_compiled(self, tree: Path) -> None:
        version, errors = said(tree, {"GEVENTSTALK_COMPILE": "1", **NO_COMPILER}, 1)
        assert version == ""
        assert "the core cannot be compiled: no C compiler: " in errors[-1]

    def test_a_wish_that_is_none(self, tree: Path) -> None:
        line = "geventstalk: GEVENTSTALK_COMPILE is neither 0 nor 1: yes"
        assert said(tree, {"GEVENTSTALK_COMPILE": "yes"}, 1) == ("", [line])

    def test_without_a_network_it_is_pure_as_long_as_that_is_there(self, tree: Path) -> None:
        version, errors = said(tree, UNPLUGGED, waits=True)
        assert version.endswith(" (pure)")
        assert "is there a network?" in errors[-2]
        assert errors[-1].endswith("the compiled one cannot be made now, see above")

    @pytest.mark.long
    def test_without_a_network_a_fresh_clone_says_so(self, tmp_path: Path) -> None:
        _, errors = said(clone(tmp_path / "fresh"), UNPLUGGED, 1)
        assert "is there a network?" in errors[-1]

    def test_a_full_disk_is_told_in_a_line(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 16 << 20) as disk:
            tree = clone(disk / "tree")
            _, errors = said(tree, PURE, 1)
        assert "no space left" in errors[-1].lower()
        assert "Traceback" not in "".join(errors)

    def test_what_pip_says_is_understood(self) -> None:
        assert NO_ROOM.search("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
        assert NO_NETWORK.search("Retrying after connection broken by 'NewConnectionError('<pip._vendor.urllib3")
        assert not NO_NETWORK.search("ERROR: Failed to build 'geventstalk' when getting requirements")


def compilers_of(tree: Path) -> set[int]:
    """The sessions of processes that compile behind a start."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            pid = int(process.name)
            ours = str(tree / "scripts" / "environment").encode() in words and b"behind" in words
            if ours and os.getpriority(os.PRIO_PROCESS, pid) == 19:  # by then it has a session of its own
                found.add(os.getsid(pid))
    return found


@when_the_build_changed
@pytest.mark.slow
class TestBehind:
    """The pure build serves, and the compiled one is made behind it. These follow the tests above."""

    def test_a_start_serves_at_once_and_one_process_compiles(self, tree: Path, tmp_path: Path) -> None:
        log = tmp_path / "log"
        server = ServerProcess([str(tree / "scripts" / "run")], [], cwd=tmp_path, stderr=log)
        try:
            server.wait_ready(MAKE_LIMIT_S)
            version, lines = said(tree)  # returns, although its readers wait for the end of its output
            assert version.endswith(" (pure)") and "is made behind it" in lines[0] and len(lines) == 1, lines
            words = [str(tree / "scripts" / "run"), "tubes", "-p", str(server.port)]
            done = subprocess.run(words, env=environment({}), capture_output=True, text=True, timeout=60, check=True)
            assert "default" in done.stdout and not done.stderr, "a command does without the quicker build"
            until(lambda: compilers_of(tree), "one compiles")
            assert server.stop() == 0
            until(lambda: len(compilers_of(tree)) == 1, "the second one gives up, the first one outlives the server")
        finally:
            for session in compilers_of(tree):
                os.killpg(session, signal.SIGKILL)
            server.stop()
        assert not is_ready(tree)

    @pytest.mark.parametrize("to", ["a file", "a pipe"])
    def test_its_end_is_told_where_the_server_still_writes(self, tree: Path, tmp_path: Path, to: str) -> None:
        made = tree / ".venv-compiled" / "made"
        program = tmp_path / "program"
        program.write_text(
            f'#!/bin/sh\n[ "$*" = "compiled --no-wait" ] && mkdir -p "{made.parent}" && echo >"{made}"\n'
        )
        program.chmod(0o755)
        words = [
            "sh",
            "-c",
            '"$@"; cat',
            "sh",
            sys.executable,
            str(tree / "scripts" / "build.py"),
            "behind",
            str(program),
        ]
        with (tmp_path / "log").open("w+") as log:
            stderr = log if to == "a file" else subprocess.PIPE
            with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=stderr, text=True) as server:
                assert server.stdin is not None
                until(made.exists, "it is made")
                if server.stderr is None:
                    until(lambda: "is made: the next start runs it" in (tmp_path / "log").read_text(), "the news")
                else:
                    assert "made behind it" in server.stderr.readline()
                    assert server.stderr.readline().endswith("the compiled build is made: the next start runs it\n")
                server.stdin.close()
        made.unlink()


@contextmanager
def running(tree: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """`scripts/run --compiled -v` while it builds, with a process group of its own."""
    with subprocess.Popen(
        [tree / "scripts" / "run", "--compiled", "-v"],
        env=environment(more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@when_the_build_changed
@pytest.mark.slow
class TestCompiled:
    """The server of the README's first command. These follow the tests above."""

    @pytest.fixture(autouse=True)
    def compiler(self) -> None:
        if not has_compiler():
            missing("a C compiler with Python's headers is not installed")

    def test_an_interrupted_build_is_none(self, tree: Path) -> None:
        with running(tree, **QUICKLY) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "translating the core to C" in line:
                    break
            os.killpg(process.pid, signal.SIGTERM)
            rest = process.stdout.read()
            assert process.wait(MAKE_LIMIT_S) == -signal.SIGTERM
        assert "interrupted" in rest and "Traceback" not in rest
        assert not is_ready(tree)

    def test_the_first_start_compiles_and_says_so_even_twice_at_once(self, tree: Path) -> None:
        with running(tree, **QUICKLY) as process:
            time.sleep(0.5)
            with running(tree, **QUICKLY) as second:
                outputs = [process.communicate()[0], second.communicate()[0]]
        assert all(output.splitlines()[-1].endswith(" (compiled)") for output in outputs), outputs
        text = "".join(outputs)
        for words in ("this takes a minute or two", "translating the core to C", "compiling the core", "waiting for"):
            assert text.count(words) >= 1, outputs
        assert text.count("this takes a minute or two") == 1, outputs
        assert is_ready(tree)

    def test_starts_again_without_making_anything(self, tree: Path) -> None:
        before = marks(tree)
        version, errors = said(tree)
        assert (version[-11:], errors, marks(tree)) == (" (compiled)", [], before)

    def test_runs_what_it_compiled_wherever_it_stands(self, tree: Path) -> None:
        """Neither the folder one stands in nor PYTHONPATH brings other sources than those that were compiled."""
        done = subprocess.run(
            [tree / "scripts" / "run", "-v"],
            cwd=tree,
            env=environment({"PYTHONPATH": str(tree)}),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip().endswith(" (compiled)")

    @pytest.mark.parametrize(
        "room", ["geventstalk/core/job.py", "geventstalk/cli/main.py", "journal/__init__.py", "setup.py"]
    )
    def test_an_edited_source_is_compiled_again(self, tree: Path, room: str) -> None:
        path = tree / room
        before = path.read_bytes()
        times = path.stat()
        path.write_bytes(before + b"# edited\n")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # an editor or a tool may restore them
        assert not is_ready(tree)
        path.write_bytes(before)
        assert is_ready(tree)

    def test_so_is_one_that_comes_or_goes(self, tree: Path) -> None:
        room = tree / "geventstalk" / "core" / "new.py"
        room.touch()
        assert not is_ready(tree)
        room.rename(room.with_suffix(".txt"))
        assert is_ready(tree)
        room.with_suffix(".txt").unlink()

    def test_the_wheel_holds_the_core_beside_its_source(self, tree: Path) -> None:
        (wheel,) = (tree / ".venv-compiled" / "wheel").glob("*.whl")
        sources = {str(path.relative_to(ROOT)) for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
        console = ROOT / "geventstalk" / "http" / "console"
        sources |= {str(path.relative_to(ROOT)) for path in console.rglob("*") if path.is_file()}
        sources.add("geventstalk/http/openapi.yaml")
        about = {name for name in wheel_names(wheel) if ".dist-info/" in name}
        check_compiled(wheel, sources | {f"{top}/py.typed" for top in PACKAGES} | about)

    def test_what_it_compiled_passes_the_tests_that_take_seconds(self, tree: Path, tmp_path: Path) -> None:
        """The rest of them: scripts/test --compiled."""
        (wheel,) = (tree / ".venv-compiled" / "wheel").glob("*.whl")
        copy = clone(tmp_path / "copy")
        put_on(wheel, copy)
        words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--build", "compiled", "-m", "not slow", *COMPILED_LAYERS]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * MAKE_LIMIT_S,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0

    def test_the_pure_build_is_still_there(self, tree: Path) -> None:
        before = marks(tree)
        version, errors = said(tree, PURE)
        assert (version[-7:], errors, marks(tree)) == (" (pure)", [], before)

    def test_works_through_a_link(self, tree: Path, tmp_path: Path) -> None:
        link = tmp_path / "geventstalk"
        link.symlink_to(tree / "scripts" / "run")
        done = subprocess.run([link, "-v"], env=environment(PURE), capture_output=True, text=True, check=True)
        assert done.stdout.startswith("geventstalk ")
        assert not done.stderr

    def test_is_not_ready_after_a_move(self, tree: Path) -> None:
        moved = tree.rename(tree.with_name("moved"))
        try:
            assert not is_ready(moved), "an environment cannot be moved"
        finally:
            moved.rename(tree)

    @pytest.mark.long
    def test_makes_its_environment_again_after_a_move(self, tree: Path) -> None:
        moved = tree.rename(tree.with_name("moved"))
        done = subprocess.run(
            [moved / "scripts" / "run", "-v"], env=environment(PURE), capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("geventstalk ")
        assert "making an environment" in done.stderr


@pytest.mark.slow
@pytest.mark.when_changed("setup.py", *(f"{name}.py" for name in compiled_modules()))
def test_the_core_can_be_translated(tmp_path: Path) -> None:
    """The short form of compiling it, for a change of the core: mypyc understands less than mypy."""
    if not has_compiler():
        missing("a C compiler with Python's headers is not installed")
    program = "import setup, sys; print(len(setup.core(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(1 + len(compiled_modules())), "its modules, and what they share"


@pytest.mark.parametrize("slower", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("network", [0.2, 1.0, 2.0])
def test_the_bar_is_right_within_a_fifth(monkeypatch: pytest.MonkeyPatch, slower: float, network: float) -> None:
    """On a machine that is slower or busier, and with another network or a full cache of pip's."""
    took_s = {name: s * slower * (network if "fetching" in name else 1) for name, s in EXPECTED_S.items()}
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    progress = Progress()
    progress.expected_s = EXPECTED_S
    shown = []
    for name, s in took_s.items():
        progress.step(name)
        for _ in range(10):
            shown.append((progress.share(), (now_s - 100) / sum(took_s.values())))
            now_s += s / 10
    assert all(abs(share - true) < 0.2 for share, true in shown), shown
    assert shown[-1][0] > 0.95 and all(before[0] <= after[0] for before, after in pairwise(shown))


class TestLock:
    """Of an environment: one process makes it, and one that a person waits for goes before one behind a server."""

    def run(self, lock: Path, program: str, *words: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(ROOT / "scripts" / "build.py"),
            "locked",
            str(lock),
            "/bin/sh",
            "-c",
            program,
            "sh",
            *words,
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    @pytest.mark.parametrize("behind", [["--no-wait"], []], ids=["behind", "beside"])
    def test_a_start_that_waits_takes_over_from_a_build_behind_another(self, tmp_path: Path, behind: list[str]) -> None:
        at_work = tmp_path / "at-work"
        with self.run(tmp_path / "lock", f"touch '{at_work}'; sleep 60 & wait", *behind) as first:
            until(at_work.exists, "it has the lock")
            third = self.run(tmp_path / "lock", "echo never", "--no-wait")
            assert (third.communicate()[0], third.returncode) == ("", BUSY)
            second = self.run(tmp_path / "lock", "echo mine")
            assert second.stderr is not None
            said = second.stderr.readline()
            if not behind:
                assert "waiting for another start that makes the environment" in said
                assert second.poll() is None
                os.killpg(first.pid, signal.SIGTERM)
            else:
                assert "taking over from one at the lowest priority" in said
            assert (second.communicate()[0], second.returncode) == ("mine\n", 0)
            assert first.wait(20) == -signal.SIGTERM
        with self.run(tmp_path / "lock", "echo again") as last:
            assert last.communicate() == ("again\n", ""), "what is left in the lock means nothing"


class TestRunWithoutPython:
    """scripts/run where no Python will do: one line that says what is missing, and nothing left behind."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        return clone(tmp_path / "tree")

    def refusal(self, tree: Path, **environment: str) -> str:
        """The one line on standard error, with only the shell's own tools and tree/bin on PATH."""
        tools = tree / "bin"
        tools.mkdir(exist_ok=True)
        for name in ("sh", "cat", "readlink", "find", "cksum", "sort"):
            with suppress(FileExistsError):
                (tools / name).symlink_to(shutil.which(name) or "/nowhere")
        done = subprocess.run(
            [tree / "scripts" / "run", "-p", str(free_port())],
            env={"PATH": str(tools), **environment},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert not (tree / ".venv").exists()
        (line,) = done.stderr.splitlines()
        return line

    def fake(self, tree: Path, name: str, text: str) -> None:
        (tree / "bin").mkdir(exist_ok=True)
        program = tree / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def test_none(self, tree: Path) -> None:
        assert "no usable Python >= 3.10 found" in self.refusal(tree)

    def test_only_names_that_do_not_run(self, tree: Path) -> None:
        self.fake(tree, "python3", "exit 127")
        assert "no usable Python >= 3.10 found" in self.refusal(tree)

    def test_too_old(self, tree: Path) -> None:
        self.fake(tree, "python3", "echo")  # what the question for the version prints there
        assert "no usable Python >= 3.10 found" in self.refusal(tree)

    def test_without_venv(self, tree: Path) -> None:
        self.fake(tree, "python3", f'case $2 in *ensurepip*) exit 1 ;; *) echo "{tree}/bin/python3" ;; esac')
        assert "apt-get install python3-venv" in self.refusal(tree)

    def test_the_named_one(self, tree: Path) -> None:
        assert "at PYTHON=/nowhere/python" in self.refusal(tree, PYTHON="/nowhere/python")

    def test_a_clone_that_cannot_be_written(self, tree: Path) -> None:
        self.fake(tree, "python3", f'exec "{sys.executable}" "$@"')
        (tree / ".venv.lock").mkdir()  # root may write everywhere, but not open this
        assert "cannot make the environment" in self.refusal(tree)
