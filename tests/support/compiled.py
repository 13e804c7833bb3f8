"""A copy of the tree whose two packages are those of the compiled wheel, so that the same tests run on that build.

    python -m tests.support.compiled FOLDER           makes the copy in a minute or two; needs a C compiler
    python -m tests.support.compiled --copy FOLDER    a copy that stays as it is

Nothing in the copy knows that it is one; `pytest --build compiled` there refuses to run on anything else.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.process import ROOT

when_the_build_changed = pytest.mark.when_changed(
    *("setup.py", "Dockerfile", "scripts/run", "scripts/environment", "scripts/places.sh", "scripts/build.py"),
    *("tests/test_run.py", "tests/test_packaging.py", "tests/support/compiled.py"),
)
"""Of tests that build wheels or environments, which takes a minute of all cores: for those files, and each night."""
PACKAGES = ("geventstalk", "journal")
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "*.egg-info", "build", "dist", "node_modules", "__pycache__", ".*_cache", ".hypothesis", "*.so"
)
BUILD_LIMIT_S = 300


class BuildFailed(Exception):
    """A failed build, with its output."""


def clone(folder: Path) -> Path:
    """A copy of the tree without what tools and runs leave in it."""

    def left_behind(place: str, names: list[str]) -> set[str]:
        journal_of_a_run = {"data"} if Path(place) == ROOT else set()
        return LEFT_BEHIND(place, names) | journal_of_a_run

    shutil.copytree(ROOT, folder, ignore=left_behind, symlinks=True)
    return folder


def build(kind: str, tree: Path, into: Path, compile: str = "0", environment: Mapping[str, str] = {}) -> Path:
    """Builds a wheel or an sdist with the backend that pyproject.toml names, as installed beside the tests.

    `compile` is GEVENTSTALK_COMPILE. Raises BuildFailed.
    """
    into.mkdir()
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, into],
        cwd=tree,
        env={**os.environ, "GEVENTSTALK_COMPILE": compile, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise BuildFailed(f"cannot build the {kind}:\n{done.stdout}{done.stderr}")
    (made,) = into.iterdir()
    return made


def unpacked(archive: Path, into: Path) -> Path:
    """The tree that a source archive holds."""
    with tarfile.open(archive) as file:
        if hasattr(tarfile, "data_filter"):  # Debian 12 has Python 3.11.2, which does not know it yet
            file.extractall(into, filter="data")
        else:
            file.extractall(into)
    (tree,) = into.iterdir()
    return tree


def put_on(wheel: Path, tree: Path) -> None:
    """Puts the packages of a wheel in the place of those of a tree."""
    for package in PACKAGES:
        shutil.rmtree(tree / package)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree, [name for name in archive.namelist() if name.split("/")[0] in PACKAGES])


def has_compiler() -> bool:
    """Returns whether the core can be compiled for this Python."""
    there = any(shutil.which(name) for name in ("cc", "gcc"))
    return there and Path(sysconfig.get_path("include"), "Python.h").exists()


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def check_compiled(wheel: Path, pure: set[str]) -> None:
    """Fails unless the wheel holds what a pure one does, and beside it each room as an extension of this Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    more = {f"{room}{suffix}" for room in ["geventstalk/compiled__mypyc", *compiled_modules()]}
    assert wheel_names(wheel) == pure | more
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name


def compiled_modules() -> set[str]:
    """Returns what setup.py says is compiled, as paths without a suffix; it holds all of the core and of the wire."""
    (table,) = re.findall(r"^MODULES = (\{.*?^\})", (ROOT / "setup.py").read_text(), re.DOTALL | re.MULTILINE)
    modules = {f"{folder}/{name}" for folder, names in ast.literal_eval(table).items() for name in names}
    pure = {path for layer in ("core", "wire") for path in (ROOT / "geventstalk" / layer).glob("*.py")}
    assert {str(path.relative_to(ROOT).with_suffix("")) for path in pure if path.stem != "__init__"} <= modules
    return modules


def main() -> int:
    try:
        tree = clone(Path(sys.argv[-1]).resolve())
        if sys.argv[1] != "--copy":
            put_on(build("wheel", tree, tree / "dist", compile="1"), tree)
    except (BuildFailed, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
