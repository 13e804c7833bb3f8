"""Fills an environment for scripts/environment, which chooses the interpreter, holds the lock and writes the marks.

    build.py pure VENV EXTRA [--refresh]    the packages of the clone, with the extra requirements of that name
    build.py compiled VENV [--refresh]      a compiled wheel of the clone; or VENV/why-pure, where there can be none
    build.py behind PROGRAM                 leaves a process behind that runs PROGRAM compiled at the lowest priority
    build.py locked LOCK PROGRAM WORDS...   runs that in its place with the lock; with --no-wait it ends with 75 instead

Says what it does now and for how long, on standard error. A failure is one line and exit code 1. It runs on any Python
from 3.10 on with nothing installed.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

try:
    import ensurepip
except ImportError:
    ensurepip = None  # type: ignore[assignment]  # Debian has it in a package of its own

ROOT = Path(__file__).resolve().parent.parent
SHOW_EVERY_S = 1.0
"""Time between two updates of a terminal."""
TELL_EVERY_S = 15.0
"""Time between two lines of a log about the same step: four a minute."""
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
RETRIES = "2"
"""The retries of pip; its own default of 5 keeps an unplugged machine waiting."""
STEPS = {
    "Installing build dependencies": "fetching what the build needs",
    "Getting requirements to build wheel": "fetching the translator to C",
    "now: translating": "translating the core to C",
    "now: compiling": "compiling the core",
}
"""Lines that pip and setup.py write while a wheel is built, and their meaning."""
EXPECTED_S = {
    "making an environment": 1.0,
    "fetching what the build needs": 4.0,
    "fetching the translator to C": 7.0,
    "translating the core to C": 15.0,
    "compiling the core": 50.0,
    "fetching what geventstalk needs": 8.0,
    "installing": 2.0,
}
"""Seconds that the steps of a compiled build take on two idle cores."""
BAR = 20
ROOM_BYTES = 1 << 20
"""With less than this an environment, which takes tens of megabytes, failed for want of room."""
NO_ROOM = re.compile(r"No space left on device|Errno 28|Disk quota exceeded")
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Network is unreachable"
    r"|ConnectTimeout|ReadTimeout|ProxyError|No matching distribution found"
)
NO_CORE = re.compile(r"geventstalk: the core cannot be compiled: (.*)")
WHEELS = [
    sysconfig.get_config_var("WHEEL_PKG_DIR") or os.devnull,
    *([Path(ensurepip.__file__).parent / "_bundled"] if ensurepip else []),
]
"""Where Python has the wheel of pip that it brings along."""
PROGRAM = "import sys\n\nfrom geventstalk.cli.main import main\n\nsys.exit(main())\n"
POSTGRES = "postgres"
"""The extra of setup.py whose packages a journal in PostgreSQL needs."""
BUSY = 75
"""The exit code of scripts/environment when another one works."""
COMPILER = "on Debian and Ubuntu: apt-get install gcc libc6-dev python3-dev"


class Failed(Exception):
    """The environment cannot be made; the message says why in a line."""


class Progress:
    """One line on standard error about what is done now; a terminal sees its seconds go by, and a bar where it is known
    how long the steps take."""

    def __init__(self) -> None:
        self.expected_s: dict[str, float] = {}
        self._begun_s = self._step_s = time.monotonic()
        self._told_s = 0.0
        self._step = ""
        self._pace = {True: 1.0, False: 1.0}  # of the network, and of this machine
        self._share = 0.0
        self._is_terminal = sys.stderr.isatty()

    def step(self, name: str) -> None:
        if name != self._step:
            now_s = time.monotonic()
            if expected_s := self.expected_s.get(self._step):
                self._pace["fetching" in self._step] = (now_s - self._step_s) / expected_s
            self._step = name
            self._step_s = self._told_s = now_s
            self._write()

    def share(self) -> float:
        """Returns how much is done. The rest is expected to be as much slower than usual as the last of its kind."""
        now_s = time.monotonic()
        names = [*self.expected_s]
        at = names.index(self._step) if self._step else 0
        left_s = [self.expected_s[name] * self._pace["fetching" in name] for name in names[at:]]
        left_s[0] = max(0.05 * left_s[0], left_s[0] - (now_s - self._step_s))
        spent_s = now_s - self._begun_s
        self._share = max(self._share, spent_s / (spent_s + sum(left_s) + 0.01))
        return self._share

    def go_on(self) -> None:
        """The same step takes longer."""
        now_s = time.monotonic()
        if now_s - self._told_s >= (SHOW_EVERY_S if self._is_terminal else TELL_EVERY_S):
            self._told_s = now_s
            self._write()

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\033[K")

    def _write(self) -> None:
        line = f"geventstalk: {time.monotonic() - self._begun_s:3.0f} s: {self._step}"
        if self.expected_s:
            share = self.share()
            bar = "#" * int(BAR * share)
            line += f" [{bar:{BAR}}]" * self._is_terminal + f" {100 * share:.0f} %"
        sys.stderr.write(f"\r\033[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()


class Environment:
    """An environment that is being made. `log` keeps everything that the programs say."""

    def __init__(self, place: Path, refresh: bool, expected_s: dict[str, float] | None = None) -> None:
        self.place = place
        self.progress = Progress()
        self.progress.expected_s = expected_s or {}
        self.log = place / "build.log"
        self.steps: dict[str, str] = {}
        for name in ("made", "made-pure", "made-for-run", "made-for-postgres", "made-for-test", "why-pure"):
            (place / name).unlink(missing_ok=True)
        if not refresh:
            self.progress.step("making an environment")
            log = place.with_name(f"{place.name}.log")
            self._run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(place)], log)
            (site,) = place.glob("lib/python3*/site-packages")
            bundled = [wheel for folder in WHEELS for wheel in sorted(Path(folder).glob("pip-*.whl"))]
            if bundled:  # as it comes with Python; to install it takes five seconds, most of them for its bytecode
                with zipfile.ZipFile(bundled[0]) as wheel:
                    wheel.extractall(site)
            elif ensurepip:
                self._run([str(place / "bin" / "python"), "-m", "ensurepip"], log)
            log.unlink()
        self.log.unlink(missing_ok=True)

    def pip(self, *words: str) -> None:
        """Runs pip of the environment, or where there is none that of the interpreter. Raises Failed."""
        python = str(self.place / "bin" / "python")
        if any(self.place.glob("lib/python3*/site-packages/pip")):
            self._run([python, *PIP, *words], self.log)
        else:
            self._run([sys.executable, *PIP, "--python", python, *words], self.log)

    def install(self, what: str, *words: str) -> None:
        """Installs it with what a journal in PostgreSQL needs; without that where that cannot be installed."""
        try:
            self.pip("install", *words, f"{what}[{POSTGRES}]")
        except Failed as failed:
            self.pip("install", *words, what)  # raises where that was not the reason
            self.progress.end()
            print(f"geventstalk: a journal in PostgreSQL cannot be used: {failed}", file=sys.stderr, flush=True)

    def _run(self, command: list[str], log: Path) -> None:
        with log.open("a+", encoding="utf-8", errors="replace") as output:
            begun = output.seek(0, os.SEEK_END)
            environment = {"PIP_RETRIES": RETRIES, **os.environ, "PYTHONUNBUFFERED": "1"}
            # The lock of scripts/environment goes on to the child, which may outlive this process.
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, close_fds=False
            ) as process:
                try:
                    self._follow(process, log, begun)
                except BaseException:
                    process.terminate()
                    raise
            if process.returncode:
                output.seek(begun)
                raise Failed(f"{self._cause(output.read())}; all of it is in {log}")

    def _follow(self, process: subprocess.Popen[bytes], log: Path, begun: int) -> None:
        with log.open(encoding="utf-8", errors="replace") as text:
            text.seek(begun)
            while process.poll() is None:
                time.sleep(0.1)
                for line in text.readlines():
                    for sign, step in self.steps.items():
                        if line.lstrip().startswith(sign):
                            self.progress.step(step)
                self.progress.go_on()

    def _cause(self, text: str) -> str:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("geventstalk: ")]
        errors = own or [line for line in lines if re.match(r"(?i)(error|\w*error)\b.*:", line)]
        last = re.sub(r"^(ERROR|error|geventstalk): ", "", (errors or lines or ["no reason is given"])[-1])
        disk = os.statvfs(self.place.parent)
        # On a full disk the log may be cut short as well.
        if NO_ROOM.search(text) or disk.f_bavail * disk.f_frsize < ROOM_BYTES:
            return f"no space left on the disk of {self.place} or of temporary files"
        if NO_NETWORK.search(text):
            return f"packages cannot be fetched, is there a network? {last}"
        return last


def make_pure(place: Path, extra: str, refresh: bool) -> None:
    environment = Environment(place, refresh)
    environment.progress.step("fetching what geventstalk needs")
    environment.pip("install", "--no-compile", *requirements("install_requires"))
    if extra == POSTGRES:
        environment.pip("install", "--no-compile", *requirements("POSTGRES"))
    elif extra:
        # What is editable is never compiled, so mypyc need not be fetched for it.
        os.environ["GEVENTSTALK_COMPILE"] = "0"
        environment.pip("install", "--editable", f"{ROOT}[{extra}]")
    (site,) = place.glob("lib/python3*/site-packages")
    (site / "geventstalk-clone.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    program = place / "bin" / "geventstalk"
    program.write_text(f"#!{place}/bin/python\n{PROGRAM}", encoding="utf-8")
    program.chmod(0o755)
    environment.progress.end()


def requirements(name: str) -> list[str]:
    """The list of this name in setup.py, which cannot be imported here: it needs setuptools."""
    known: dict[str, Any] = {"sysconfig": sysconfig}
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("POSTGRES", "RE2"):
            known[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), known)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            words = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
            if isinstance(words.get("install_requires"), ast.List):
                needed = words["install_requires"]
    return list(known[name] if name in known else eval(ast.unparse(needed), known))


def make_compiled(place: Path, refresh: bool) -> None:
    wish = os.environ.get("GEVENTSTALK_COMPILE", "")
    os.environ["GEVENTSTALK_COMPILE"] = "1"  # where it cannot be compiled, the other environment serves, not this wheel
    print(
        "geventstalk: building geventstalk from this clone, with its core compiled; this takes a minute or two"
        " (GEVENTSTALK_COMPILE=0 starts the pure build in seconds)",
        file=sys.stderr,
        flush=True,
    )
    environment = Environment(place, refresh, EXPECTED_S)
    environment.steps = STEPS
    wheels = place / "wheel"
    for old in wheels.glob("*.whl"):
        old.unlink()
    try:
        environment.pip("wheel", "--verbose", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    except Failed:
        found = NO_CORE.search(environment.log.read_text(encoding="utf-8", errors="replace"))
        if wish == "1" or found is None or NO_ROOM.search(environment.log.read_text(errors="replace")):
            raise
        environment.progress.end()
        headers = Path(sysconfig.get_path("include"), "Python.h")
        (place / "why-pure").write_text(f"{found[1]} ({COMPILER})\n{headers}\n")
        return
    environment.steps = {}
    (wheel,) = wheels.iterdir()
    environment.progress.step("fetching what geventstalk needs")
    environment.install(str(wheel))
    environment.progress.step("installing")
    environment.pip("install", "--force-reinstall", "--no-deps", str(wheel))
    environment.progress.end()


def leave_behind(program: str) -> None:
    """Compiles in a process that neither the server nor its terminal, its readers and its end have to do with.

    The server's process is the one that started this one. When the compiled build is made, its log says so.
    """
    server = os.getppid()
    try:
        alive = os.pidfd_open(server)
    except OSError:
        alive = -1  # an old kernel: nothing is said in the end
    print(
        "geventstalk: this start serves the pure build, the slower one; the compiled one is made behind it, for the "
        "next start (--compiled waits for it, GEVENTSTALK_COMPILE=0 does without)",
        file=sys.stderr,
        flush=True,
    )
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    # A reader of a pipe would wait for its end, so the pipe is closed, and opened again for one line.
    shared = os.isatty(2) or stat.S_ISREG(os.fstat(2).st_mode)
    log = os.dup(2) if shared else -1
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.nice(19)
    with suppress(OSError):  # where sessions share the processor out, the niceness of the session counts
        Path("/proc/self/autogroup").write_text("19")
    calm = ["ionice", "-c", "3"] if shutil.which("ionice") else []
    code = subprocess.run([*calm, program, "compiled", "--no-wait"], check=False).returncode
    if code == BUSY:
        return  # another start makes it
    made = (ROOT / ".venv-compiled" / "made").exists()
    text = "is made: the next start runs it" if made else f"cannot be made, see {ROOT}/.venv-compiled/build.log"
    with suppress(OSError):
        signal.pidfd_send_signal(alive, 0)  # another process may have its number by now
        if not shared:
            log = os.open(f"/proc/{server}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.write(log, f"geventstalk: the compiled build {text}\n".encode())


def run_locked(path: str, command: list[str]) -> None:
    """Runs the command in place of this process, with the lock of an environment, which ends with its last process.

    A build that is under way at the lowest priority is ended, because its priority cannot be raised without rights.
    flock(1) is not everywhere.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if "--no-wait" in command:
            sys.exit(BUSY)
        behind = os.pread(lock, 20, 0)
        does = "taking over from one at the lowest priority" if behind else "waiting for another start"
        print(f"geventstalk: {does} that makes the environment", file=sys.stderr, flush=True)
        if behind:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(behind), signal.SIGTERM)
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.ftruncate(lock, 0)
    if "--no-wait" in command:
        os.pwrite(lock, str(os.getpgrp()).encode(), 0)
    os.set_inheritable(lock, True)
    os.execv(command[0], command)


def ended(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--refresh"]
    refresh = "--refresh" in sys.argv
    signal.signal(signal.SIGTERM, ended)
    try:
        if words[0] == "behind":
            leave_behind(words[1])
        elif words[0] == "locked":
            run_locked(words[1], words[2:])
        elif words[0] == "compiled":
            make_compiled(Path(words[1]), refresh)
        else:
            make_pure(Path(words[1]), words[2], refresh)
    except Failed as failed:
        print("\r\033[K" * sys.stderr.isatty() + f"geventstalk: cannot make the environment: {failed}", file=sys.stderr)
        return 1
    except OSError as error:
        name = error.filename or words[1]
        print(f"geventstalk: cannot make the environment: {error.strerror}: {name}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngeventstalk: interrupted; the next start makes the environment", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
