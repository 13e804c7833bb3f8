"""The program as its user meets it: words, exit codes, output, early signals; and some real starts."""

from __future__ import annotations

import functools
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geventstalk import __version__, exits
from geventstalk._build import BUILD
from geventstalk.cli import early
from geventstalk.cli import serve as cli
from geventstalk.cli.main import COMMANDS
from geventstalk.cli.program import leaves
from geventstalk.config import OPTIONS, CommandLine, ConfigError, Settings
from geventstalk.serving import listen
from tests.support.clients import until
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess, free_port
from tests.support.wire import Client

# A server that does what the test wants instead of serving, so that what happens around it can be seen.
_STAND_IN = """
import os, sys, threading, types

class Server:
    def __init__(self, settings, listeners, log, site):
        if BEHAVIOUR == "fail to start":
            raise RuntimeError("two\\nlines")
        self.listeners = listeners

    def run(self, drains):
        if BEHAVIOUR == "modules":
            slow = {"gevent", "yaml", "sqlite3", "json", "asyncio", "encodings.idna"}
            slow |= {"geventstalk.remote", "geventstalk.cli.program", "geventstalk.client", "rich", "http"}
            print(*sorted(slow & set(sys.modules)), flush=True)
            return 0
        if BEHAVIOUR == "end":
            return 74
        print("running", flush=True)
        while True:  # as a replay does, without the event loop
            sum(range(1000))

BEHAVIOUR = sys.argv.pop(1)
module = types.ModuleType("geventstalk.serving.server")
module.Server = Server
if BEHAVIOUR != "missing":
    sys.modules["geventstalk.serving.server"] = module
else:
    sys.modules["geventstalk.serving.server"] = None

from geventstalk.cli.main import main
sys.exit(main())
"""


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GEVENTSTALK_")}
    return {**inherited, "PYTHONPATH": str(ROOT), **(extra or {})}


def run(*words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program, which must end by itself."""
    done = subprocess.run(
        [*GEVENTSTALK, *words],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


Checked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Checked:
    """Returns what --check-config says, in this process: a process of its own takes a quarter of a second."""
    for name in os.environ:
        if name.startswith("GEVENTSTALK_"):
            monkeypatch.delenv(name)

    def check(*words: str) -> tuple[int, str, str]:
        code = cli.run(["--check-config", *words], [])
        return code, *capsys.readouterr()

    return check


@functools.cache
def help_text() -> str:
    """Returns what --help prints, for which every command is imported."""
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    return out


def refused(*words: str, env: dict[str, str] | None = None) -> str:
    """The only line the program prints when it refuses these words."""
    code, out, err = run(*words, env=env)
    assert (code, out) == (5, "")
    assert err.count("\n") == 1 and err.startswith("geventstalk: ")
    return err[len("geventstalk: ") : -1]


class StandIn:
    """The program with a stand-in server, as a child process."""

    def __init__(self, behaviour: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STAND_IN, behaviour, *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_running(self) -> None:
        assert self.process.stdout is not None
        while self.process.stdout.readline() not in ("running\n", ""):
            pass

    def end(self, timeout_s: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@pytest.fixture
def stand_in() -> Iterator[Callable[..., StandIn]]:
    started: list[StandIn] = []

    def start(behaviour: str, *words: str) -> StandIn:
        started.append(StandIn(behaviour, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate(timeout=60)


# The words


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("", {}),
        ("-p 11300", {"port": "11300"}),
        ("-p11300", {"port": "11300"}),
        ("--port 11300", {"port": "11300"}),
        ("--port=11300", {"port": "11300"}),
        ("-VFVp11300", {"verbose": 2, "fsync_ms": "never", "port": "11300"}),
        ("-VFVukr", {"verbose": 2, "fsync_ms": "never", "user": "kr"}),
        ("-f0 -b/x=y", {"fsync_ms": "0", "journal": "/x=y"}),
        ("-b --", {"journal": "--"}),
        ("-b -p -p 5", {"journal": "-p", "port": "5"}),
        ("-f 5 -F", {"fsync_ms": "never"}),
        ("-F -f 5", {"fsync_ms": "5"}),
        ("-f 5 -F -f 7", {"fsync_ms": "7"}),
        ("--no-fsync --fsync-ms 3", {"fsync_ms": "3"}),
        ("-c", {"compact": True}),
        ("-n", {"compact": False}),
        ("-n -c -n", {"compact": False}),
        ("--no-compact", {"compact": False}),
        ("-l unix:PATH", {"listen": ("unix:PATH",)}),
        ("-lunix:PATH -l 127.0.0.1 --listen=::1", {"listen": ("unix:PATH", "127.0.0.1", "::1")}),
        ("-z 5 -s 6", {"max_job_bytes": "5", "segment_bytes": "6"}),
        ("-z -5", {"max_job_bytes": "-5"}),
        ("--verbose -V", {"verbose": 2}),
        ("--log-format json", {"log_format": "json"}),
        ("-p 1 -p 2", {"port": "2"}),
        ("--port=", {"port": ""}),
    ],
)
def test_words(words: str, flags: dict[str, object]) -> None:
    assert cli.parse(words.split()) == CommandLine(flags)


def test_words_that_are_no_settings() -> None:
    assert cli.parse(["--config", "a"]) == CommandLine(config="a")
    assert cli.parse(["--check-config"]) == CommandLine(check_config=True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-x", "unknown flag: -x; see geventstalk --help"),
        ("-Vx", "unknown flag: -x; see geventstalk --help"),
        ("--foo", "unknown flag: --foo; see geventstalk --help"),
        ("--por 1", "unknown flag: --por, did you mean --port?"),
        ("foo", "unknown argument: foo; see geventstalk --help"),
        ("-p 1 foo -V", "unknown argument: foo; see geventstalk --help"),
        ("-", "unknown argument: -; see geventstalk --help"),
        ("-- -V", "unknown argument: -V; see geventstalk --help"),
        ("tubs", "unknown argument: tubs, did you mean tubes?"),
        ("-p 1 tubes", "unknown argument: tubes; a command is the first word: geventstalk tubes"),
        ("--json tubes", "unknown flag: --json; a command is the first word: geventstalk tubes"),
        ("-p", "flag requires an argument: -p"),
        ("-Vp", "flag requires an argument: -p"),
        ("--port", "flag requires an argument: --port"),
        ("--config", "flag requires an argument: --config"),
        ("--no-fsync=1", "flag takes no argument: --no-fsync"),
        ("--compact=no", "flag takes no argument: --compact"),
        ("--verbose=2", "flag takes no argument: --verbose"),
    ],
)
def test_words_that_are_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.parse(words.split())
    assert str(caught.value) == text


def test_each_option_has_its_flags_and_help_in_the_usage_text() -> None:
    out = help_text()
    assert out.startswith("Usage: geventstalk ")
    text = " ".join(out.split())
    for option in OPTIONS:
        for flag in option.flags + option.negative:
            assert flag in text
        assert option.help in text
        assert option.negative_help in text
        if option.kind == "value" and option.default is not None:
            assert f"Default: {option.default}." in text
    assert run("-h") == (0, out, "")


def test_the_help_has_every_command() -> None:
    out = help_text()
    words = [words for words, _ in leaves()]
    assert {word.split()[0] for word in words} == set(COMMANDS)
    for word in words:
        assert re.search(rf"^  {word}  +[A-Z].*\.$", out, re.MULTILINE), word


# Ends that need no server


def test_version() -> None:
    assert (
        run("-v") == run("--version") == run("-Vv", "-p", "99999") == (0, f"geventstalk {__version__} ({BUILD})\n", "")
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__), "client libraries split it at the dots"


def test_refusals_are_one_line_with_exit_code_5() -> None:
    assert refused("-x") == "unknown flag: -x; see geventstalk --help"
    assert refused("-z", "10q") == "invalid size: 10q (-z, --max-job-bytes)"
    assert refused("-p", "nosuchservice").startswith("invalid port: nosuchservice, which is no service of this host")
    assert refused("-p99999") == "invalid port: 99999, the highest is 65535 (-p, --port)"
    assert refused("-p", "-1") == "invalid port: -1 (-p, --port)"
    assert refused(env={"GEVENTSTALK_PROT": "1"}).startswith("unknown environment variable: GEVENTSTALK_PROT")
    assert refused("--config", "/nonexistent/x") == "cannot read /nonexistent/x: No such file or directory"
    assert refused("one\ntwo\x1b") == "unknown argument: one\\ntwo\\x1b; see geventstalk --help"


def test_bad_settings_are_refused_before_anything_is_bound(tmp_path: Path) -> None:
    path, settings = tmp_path / "s", tmp_path / "settings.yaml"
    settings.write_text("verbose: loud\n", encoding="utf-8")
    assert refused("-l", f"unix:{path}", "--config", str(settings)).startswith("invalid verbosity: loud (verbose in ")
    assert not path.exists()


def test_check_config_says_fine_and_binds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    example = str(ROOT / "conf" / "geventstalk.yaml")
    fine = (0, "geventstalk: configuration is fine\n", "")
    assert run("--check-config", "--config", example, "-l", f"unix:{path}") == fine
    assert run("--check-config", "-p", "0", env={"GEVENTSTALK_CONFIG": example}) == fine
    assert not path.exists()
    code, out, err = run("--check-config", "-p", "0", "-z", "2000000000", "-s1")
    assert (code, out) == (0, fine[1])
    assert [line.split(" ", 1)[1] for line in err.splitlines()] == [
        "WARNING maximum job size was set to 1073741824",
        "WARNING size of journal files was set to 4096",
    ]
    assert refused("--check-config", "-p", "x y") == "invalid port: x y (-p, --port)"


def files_of(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


# Bug: --check-config looked at the settings alone, not at ports, users and directories.
def test_check_config_finds_what_a_start_would_find(tmp_path: Path, checked: Checked) -> None:
    """Each of these was once fine for --check-config, and ended a start. The exit codes are those of the start."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = files_of(tmp_path)
    cases = [
        (["-l", "192.0.2.1"], 111, "cannot listen on 192.0.2.1 port 11300: Cannot assign requested address"),
        (["-l", f"unix:{tmp_path}/absent/s"], 111, f"cannot listen on unix:{tmp_path}/absent/s: No such file or"),
        (["-l", f"unix:{tmp_path}/file"], 111, "another file already exists in the given path: "),
        (["-l", f"unix:{tmp_path}/file/s"], 111, f"cannot listen on unix:{tmp_path}/file/s: Not a directory"),
        (["-u", "no such user"], 33, 'getpwnam("no such user"): no such user'),
        (["-b", f"{tmp_path}/absent/data"], 10, f"cannot use journal directory {tmp_path}/absent/data: No such file"),
        (["-b", f"{tmp_path}/file"], 10, f"cannot use journal directory {tmp_path}/file: "),
        (["-b", f"{tmp_path}/file/data"], 10, f"cannot use journal directory {tmp_path}/file/data: Not a directory"),
    ]
    for words, code, text in cases:
        address = [] if words[0] == "-l" else ["-l", "127.0.0.1"]
        port = [] if words[0] == "-p" else ["-p", "0"] if "11300" not in text else []
        ran = checked(*address, *port, *words)
        assert ran[:2] == (code, "") and ran[2].startswith(f"geventstalk: {text}"), words
        assert files_of(tmp_path) == before
        started = run(*address, *port, *words)
        assert started[0] == code and text.split(": ")[0] in started[2], words
    fine = ["-l", "127.0.0.1", "-l", f"unix:{tmp_path}/s", "-p", "0", "-b", f"{tmp_path}/new"]
    assert checked(*fine) == (0, "geventstalk: configuration is fine\n", "")
    assert files_of(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as what is refused here would not be with rights of its own")
def test_check_config_asks_for_the_user_that_will_serve(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").mkdir(mode=0o700)
    code, _, err = run("--check-config", "-u", "nobody", "-p", "0", "-b", f"{tmp_path}/data")
    assert (code, err) == (10, f"geventstalk: cannot use journal directory {tmp_path}/data: Permission denied\n")
    os.chown(tmp_path / "data", pwd.getpwnam("nobody").pw_uid, -1)
    assert run("--check-config", "-u", "nobody", "-p", "0", "-b", f"{tmp_path}/data")[0] == 0


# Bug: A file that only root could read was accepted at a start.
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as what is refused here would not be with rights of its own")
def test_a_file_that_is_read_again_later_has_to_be_readable_for_the_user_that_serves() -> None:
    """Otherwise a token that is taken out of the file would be good for ever."""
    with tempfile.TemporaryDirectory() as folder:  # where each user may enter, unlike pytest's own
        os.chmod(folder, 0o755)
        check_files_read_again(Path(folder))


def check_files_read_again(folder: Path) -> None:
    tokens = folder / "tokens"
    tokens.write_text("ci admin 0123456789abcdef\n")
    tokens.chmod(0o600)
    words = ["-u", "nobody", "-l", "127.0.0.1", "-p", "0", "--http", "0", "--http-tokens", str(tokens)]
    refusal = f"geventstalk: user nobody cannot read {tokens} (--http-tokens), which is read again later\n"
    assert run("--check-config", *words) == run(*words) == (5, "", refusal)
    os.chown(tokens, pwd.getpwnam("nobody").pw_uid, -1)
    assert run("--check-config", *words)[0] == 0
    settings = folder / "settings"
    settings.touch(0o600)
    shared = Settings(journal="postgresql://h/d", user="nobody")
    assert cli.files_of(shared, str(settings)) == {"--http-tokens": None, "--access": None, "--config": str(settings)}
    with pytest.raises(ConfigError, match=r"settings \(--config\)"):
        listen.require_readable("nobody", cli.files_of(shared, str(settings)))
    with_users = cli.files_of(Settings(access="a"), str(settings))
    assert with_users == {"--http-tokens": None, "--access": "a", "--config": str(settings)}
    assert cli.files_of(Settings(), str(settings))["--config"] is None, "nothing of it is used before a restart"


# Bug: The server gave one warning, and had none of the jobs.
def test_the_directory_of_a_beanstalkd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binlog.1").write_bytes(b"")
    (tmp_path / "lock").touch()
    words = ["-l", "127.0.0.1", "-p", "0", "-b", str(tmp_path)]
    before = files_of(tmp_path)
    code, out, err = run(*words)
    assert (code, out, err) == run("--check-config", *words)
    assert (code, out) == (10, "") and f"'geventstalk import-binlog {tmp_path} NEWDIR'" in err and err.count("\n") == 1
    assert files_of(tmp_path) == before


def test_a_journal_beside_the_files_of_a_beanstalkd_is_served(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Earlier versions warned and made one."""
    assert start_server("-b", str(tmp_path)).stop() == 0
    (tmp_path / "binlog.1").touch()
    assert start_server("-b", str(tmp_path)).stop() == 0


def test_a_journal_where_every_user_may_look_is_told_of(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for mode, times in ((0o750, 0), (0o755, 1)):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data").chmod(mode)
        start_server("-b", f"{tmp_path}/data", stderr=log).stop()
        assert log.read_text().count("0755 of") == times


def test_check_config_beside_the_server_of_this_configuration(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """The files of the running server will be free when it is replaced: a warning, and the exit code says fine."""
    server = start_server("-b", str(tmp_path / "data"))
    words = ["-l", "127.0.0.1", "-p", str(server.port), "-b", f"{tmp_path}/data"]
    code, out, err = run("--check-config", *words)
    assert (code, out) == (0, "geventstalk: configuration is fine\n")
    assert [line.split(" ", 1)[1] for line in err.splitlines()] == [
        f"WARNING at this moment: cannot listen on 127.0.0.1 port {server.port}: Address already in use",
        f"WARNING at this moment: journal directory {tmp_path}/data is in use by process {server.process.pid}",
    ]
    assert ask(server, b"put 0 0 1 1\r\na\r\n") == b"INSERTED 1\r\n"


def test_switches_about_compaction_print_nothing(checked: Checked) -> None:
    fine = (0, "geventstalk: configuration is fine\n", "")
    assert checked("-p", "0", "-c") == checked("-p", "0", "-n") == checked("-p", "0") == fine


def test_an_address_that_cannot_be_listened_on(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        words = ("-l", f"unix:{tmp_path}/s", "-l", "127.0.0.1", "-p", str(port))
        assert run(*words) == (111, "", f"geventstalk: {text}\n")
        code, out, err = run(*words, "--log-format=json")
        assert (code, out) == (111, "")
        line = json.loads(err)
        assert (line["level"], line["message"]) == ("ERROR", text)
        code, out, err = run("-V", *words)
        assert code == 111
        assert re.fullmatch(r"pid \d+\n", out)
    assert os.listdir(tmp_path) == []


def test_an_unknown_user(tmp_path: Path) -> None:
    code, out, err = run("-u", "no such user", "-l", f"unix:{tmp_path}/s")
    assert (code, out, err) == (33, "", 'geventstalk: getpwnam("no such user"): no such user\n')
    assert os.listdir(tmp_path) == []


def test_the_console_script_and_the_module_are_one_program() -> None:
    script = "import sys; from geventstalk.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "-v"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == run("-v")


# Around a stand-in server


def test_nothing_slow_is_imported_before_the_port_is_open(stand_in: Callable[..., StandIn]) -> None:
    assert stand_in("modules", "-l", "127.0.0.1", "-p", "0").end() == (0, "\n", "")


def test_little_is_imported_before_the_signal_handlers_are_set() -> None:
    """Until then a signal kills, and passes a process with pid 1 by."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import geventstalk.cli.main; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    slow = {"typing", "dataclasses", "inspect", "re", "logging", "socket", "click"}
    assert not slow & set(done.stdout.split())


def test_verbosity_prints_pid_and_addresses(stand_in: Callable[..., StandIn], tmp_path: Path) -> None:
    one = stand_in("end", "-V", "-l", "127.0.0.1", "-l", "::1", "-l", f"unix:{tmp_path}/s", "-p0")
    code, out, err = one.end()
    assert (code, err) == (74, "")
    lines = out.splitlines()
    assert lines[0] == f"pid {one.process.pid}"
    assert re.fullmatch(r"bind \d+ 127\.0\.0\.1:\d+", lines[1])
    assert re.fullmatch(r"bind \d+ \[::1\]:\d+", lines[2])
    assert re.fullmatch(rf"bind \d+ {re.escape(str(tmp_path))}/s", lines[3])
    assert len(lines) == 4


def test_the_servers_exit_code_is_the_programs_and_its_socket_is_removed(
    stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    assert stand_in("end", "-l", f"unix:{tmp_path}/s").end() == (74, "", "")
    assert os.listdir(tmp_path) == []


def test_an_unexpected_fault_is_one_line(stand_in: Callable[..., StandIn], tmp_path: Path) -> None:
    code, out, err = stand_in("fail to start", "-l", f"unix:{tmp_path}/s").end()
    assert (code, out, err) == (70, "", "geventstalk: unexpected error: RuntimeError: two\\nlines; -VV shows where\n")
    assert os.listdir(tmp_path) == []
    code, _, err = stand_in("fail to start", "-VV", "-l", f"unix:{tmp_path}/s").end()
    assert code == 70
    assert err.startswith("Traceback (most recent call last):\n")


def test_a_server_that_cannot_be_loaded_is_one_line(stand_in: Callable[..., StandIn], tmp_path: Path) -> None:
    code, out, err = stand_in("missing", "-l", f"unix:{tmp_path}/s").end()
    assert (code, out) == (70, "")
    assert err.startswith("geventstalk: unexpected error: ModuleNotFoundError: ") and err.count("\n") == 1


@pytest.mark.parametrize("number", exits.STOP_SIGNALS)
def test_a_stop_signal_before_the_server_runs_ends_cleanly(
    number: signal.Signals, stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    one = stand_in("replay", "-l", f"unix:{tmp_path}/s", "-l", "127.0.0.1", "-p0")
    one.wait_running()
    assert os.listdir(tmp_path) == ["s"]
    one.process.send_signal(number)
    assert one.end(timeout_s=5) == (0, "", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", exits.STOP_SIGNALS)
def test_a_command_that_is_stopped_early_does_not_end_with_0(number: signal.Signals) -> None:
    """Before a command sets its own handlers: its work is not done, and a script must see that."""
    script = (
        "import os, sys, types\n"
        "module = types.ModuleType('geventstalk.cli.program')\n"
        f"module.main = lambda words: os.kill(os.getpid(), {int(number)})\n"
        "sys.modules['geventstalk.cli.program'] = module\n"
        "from geventstalk.cli.main import main; sys.exit(main(['journal']))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("number", early.DRAIN_SIGNALS)
def test_a_drain_signal_before_the_server_runs_does_no_harm(
    number: signal.Signals, stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    one = stand_in("replay", "-l", f"unix:{tmp_path}/s")
    one.wait_running()
    one.process.send_signal(number)
    one.process.send_signal(signal.SIGTERM)
    assert one.end(timeout_s=5) == (0, "", "")


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    script = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv.pop(0)\n" + _STAND_IN
    with subprocess.Popen(
        [sys.executable, "-c", script, "", "replay", "-l", f"unix:{tmp_path}/s"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"running\n"
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        finally:
            process.kill()


# The real server


def ask(server: ServerProcess, request: bytes) -> bytes:
    with server.connect() as client:
        client.sendall(request + b"quit\r\n")
        return client.makefile("rb").read()


def test_settings_reach_the_server(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("max_job_bytes: 5\nport: 1\nsegment_bytes: 8192\n", encoding="utf-8")
    server = start_server(
        "--config",
        str(settings),
        "-s",
        "16384",
        "-b",
        str(tmp_path / "data"),
        env={"GEVENTSTALK_MAX_JOB_BYTES": "3"},
    )
    reply = ask(server, b"put 0 0 1 4\r\nabcd\r\nstats\r\n")
    assert reply.startswith(b"JOB_TOO_BIG\r\n")
    assert b"max-job-size: 3\n" in reply
    assert b"binlog-max-size: 16384\n" in reply


def test_a_real_server_on_several_addresses(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("-l", f"unix:{path}", "-l", "::1")
    for family, address in ((socket.AF_UNIX, str(path)), (socket.AF_INET6, ("::1", server.port))):
        with socket.socket(family) as client:
            client.settimeout(10)
            client.connect(address)
            client.sendall(b"list-tube-used\r\n")
            assert client.recv(100) == b"USING default\r\n"
    assert server.stop() == 0
    assert not path.exists()


def test_the_log_says_where_it_listens(tmp_path: Path) -> None:
    """The port as it was bound, and what a wildcard exposes."""
    command = [*GEVENTSTALK, "-p", "0"]
    wildcards = {
        "0.0.0.0": ("0.0.0.0", ", which is every IPv4 address of this host"),
        "::": ("[::]", ", which is every address of this host"),
        "127.0.0.1": ("127.0.0.1", ""),
    }
    for address, (shown, meaning) in wildcards.items():
        words = ["-l", address, "-l", f"unix:{tmp_path}/s"]
        with subprocess.Popen([*command, *words], env=environment(), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = [process.stderr.readline().rstrip("\n").split(" ", 1)[1] for _ in range(2)]
            process.terminate()
        assert re.fullmatch(rf"INFO listening on {re.escape(shown)}:[1-9]\d*{meaning}", lines[0]), lines
        assert lines[1] == f"INFO listening on unix:{tmp_path}/s"


def test_a_second_server_does_not_take_the_first_ones_socket(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    server = start_server(unix_path=path)
    code, out, err = run("-l", f"unix:{path}")
    assert (code, out, err) == (
        111,
        "",
        f"geventstalk: local socket {path} is in use: a server listens on it\n",
    )
    assert ask(server, b"list-tube-used\r\n") == b"USING default\r\n"
    server.kill()
    heir = start_server(unix_path=path)
    assert ask(heir, b"list-tube-used\r\n") == b"USING default\r\n"


@pytest.mark.parametrize("number", exits.STOP_SIGNALS)
def test_a_real_server_ends_at_once(number: signal.Signals, start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    with server.connect():
        server.process.send_signal(number)
        assert server.process.wait(5) == 0


def test_every_exit_code_is_documented() -> None:
    table = ""
    text = (ROOT / "docs" / "reference.md").read_text()
    for title in ("## Exit codes of the server", "### For scripts"):
        table += text.partition(title)[2].partition("\n## ")[0]
    documented = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(", ")}
    assert documented == {code for name, code in vars(exits).items() if name.startswith("EXIT_")}


def test_a_client_that_comes_early_is_served() -> None:
    """The port answers while the server is still being imported; the request waits for it."""
    port = free_port()
    process = subprocess.Popen(
        [*GEVENTSTALK, "-l", "127.0.0.1", "-p", str(port)], env=environment(), stdin=subprocess.DEVNULL
    )
    try:
        client = None
        tries = threading.Event()
        for _ in range(4000):
            try:
                client = socket.create_connection(("127.0.0.1", port), timeout=10)
                break
            except ConnectionRefusedError:
                tries.wait(0.001)
        assert client is not None
        with client:
            client.sendall(b"list-tube-used\r\n")
            assert client.recv(100) == b"USING default\r\n"
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_never_a_file_of_the_server(closed: str, tmp_path: Path) -> None:
    """A socket or a file of the journal had the number 2, and what a library prints on stderr would go there."""
    port = free_port()
    flags = ["-l", "127.0.0.1", "-p", str(port), "-b", str(tmp_path / "journal")]
    with subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *GEVENTSTALK, *flags], cwd=ROOT) as process:
        try:
            until(lambda: is_listening(port), "it listens")
            with Client(socket.create_connection(("127.0.0.1", port), timeout=20)) as client:
                client.put(b"one")
                names = {number: os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)}
        finally:
            process.terminate()
        assert process.wait(20) == 0
    for number, word in enumerate(["<&-", ">&-", "2>&-"]):
        if word in closed.split():
            assert names[number] == "/dev/null", names
    assert not any(str(tmp_path) in name or "socket" in name for name in names.values()), names


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
