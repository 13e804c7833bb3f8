"""The environment of the compiled build, made once under build/bench and again when a source changes.

`pip install` with a C compiler makes it, from a copy, so that nothing of the build stays in the tree.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.benchmark.servers import ROOT, Build, compiled, is_compiled

VENV = ROOT / "build" / "bench" / "venv"
PYTHON = VENV / "bin" / "python"
MARK = VENV / "made-from"
PLOTTING = "matplotlib>=3.8"


def _sources() -> list[Path]:
    packages = [path for name in ("geventstalk", "journal") for path in sorted((ROOT / name).rglob("*.py"))]
    return [ROOT / "setup.py", ROOT / "pyproject.toml", *packages]


def _digest() -> str:
    digest = hashlib.sha256(str(ROOT).encode())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make() -> Build | None:
    """The compiled build, ready to start; None, with a line that says why, where it cannot be made."""
    wanted = _digest()
    if not (MARK.is_file() and MARK.read_text() == wanted and PYTHON.exists()):
        print("compiling geventstalk into build/bench (once for each change; a minute or two)", flush=True)
        try:
            _install()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no compiled build: {error}", file=sys.stderr)
            return None
        MARK.write_text(wanted)
    build = compiled(str(PYTHON))
    try:
        if is_compiled(build):
            return build
        print("no compiled build: pip installed pure Python (is there a C compiler?)", file=sys.stderr)
    except OSError as error:
        print(f"no compiled build: {error}", file=sys.stderr)
    return None


def _install() -> None:
    MARK.unlink(missing_ok=True)
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, PLOTTING], check=True)
    with tempfile.TemporaryDirectory(prefix="geventstalk-bench-") as directory:
        for path in ROOT.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy2(path, directory)
        for name in ("geventstalk", "journal"):
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, Path(directory) / name, ignore=ignore)
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run([*pip[:3], "uninstall", "--yes", "--quiet", "geventstalk"], check=True, capture_output=True)
        subprocess.run([*pip, f"{directory}[postgres]"], check=True, env={**os.environ, "GEVENTSTALK_COMPILE": "1"})
