"""The layers of DESIGN.md: the import contracts know every module and bite, and what they cannot say is checked here.

`lint-imports` itself runs in scripts/test; here violations are planted in a copy to see that it would find them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.compiled import compiled_modules

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("geventstalk", "journal")
LINES_MAX = 70
HEADER_LINES_MAX = 10
WALL_CLOCK = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def source_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two packages and their contracts in a folder where they may be broken."""
    folder = tmp_path_factory.mktemp("rig")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200", "NO_COLOR": "1"}
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_picture_of_the_layers_is_that_of_the_contracts() -> None:
    """The rows in docs/architecture.md name what the contract names, from the top to the bottom."""
    contracts = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    wanted = [sorted(re.findall(r"geventstalk\.([\w.]+)", row)) for row in contracts[0].splitlines()]
    picture = re.findall(r"^┌.*?^└", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    rows = [re.findall(r"^│ (.*?) *│", row, re.MULTILINE) for row in picture.split("├")]
    assert [sorted(" ".join(row).split()) for row in rows] == wanted


def test_the_files_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", page)
    assert len(paths) > 20
    for path in paths:
        assert any((ROOT / at / path).exists() for at in ("", "geventstalk", "journal/sqlite")), path


@pytest.mark.slow
@pytest.mark.when_changed("pyproject.toml", "tests/test_layers.py")
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("geventstalk/core/job.py", "import geventstalk.wire.session"),
        ("geventstalk/core/order.py", "import geventstalk.durable.store"),
        ("geventstalk/core/timerwheel.py", "import time"),
        ("geventstalk/core/engine.py", "import geventstalk.wire.protocol"),
        ("geventstalk/core/engine.py", "import random"),
        ("geventstalk/core/dispatch.py", "import geventstalk.core.due"),
        ("geventstalk/wire/protocol.py", "import geventstalk.core.engine"),
        ("geventstalk/wire/session.py", "import geventstalk.durable.store"),
        ("geventstalk/wire/session.py", "def late() -> None:\n    import socket"),
        ("geventstalk/durable/records.py", "import os"),
        ("geventstalk/durable/store.py", "import sqlite3"),
        ("geventstalk/durable/store.py", "import gevent.event"),
        ("geventstalk/config.py", "import geventstalk.serving.server"),
        ("geventstalk/serving/listen.py", "import gevent"),
        ("geventstalk/logs.py", "import geventstalk.config"),
        ("geventstalk/serving/server.py", "import sqlite3"),
        ("geventstalk/serving/server.py", "import geventstalk.cli.main"),
        ("geventstalk/serving/connection.py", "import geventstalk.durable.store"),
        ("geventstalk/serving/connection.py", "import journal"),
        ("geventstalk/offline/binlog.py", "import geventstalk.core.engine"),
        ("geventstalk/offline/inspect.py", "import click"),
        ("geventstalk/remote/api.py", "import geventstalk.core.engine"),
        ("geventstalk/remote/bulk.py", "import gevent"),
        ("geventstalk/offline/keep.py", "import journal.sqlite.survey"),
        ("geventstalk/durable/store.py", "import journal.sqlite.log"),
        ("geventstalk/serving/acceptor.py", "import geventstalk.cli.main"),
        ("geventstalk/serving/server.py", "import falcon"),
        ("geventstalk/http/views.py", "import geventstalk.serving.server"),
        ("geventstalk/http/backend.py", "import journal"),
        ("geventstalk/front/front.py", "import geventstalk.wire.protocol"),
        ("geventstalk/front/frames.py", "import geventstalk.serving.listen"),
        ("geventstalk/serving/fronts.py", "import journal"),
        ("geventstalk/serving/link.py", "import geventstalk.durable.store"),
        ("geventstalk/cluster/member.py", "import time"),
        ("geventstalk/cluster/member.py", "import geventstalk.http.site"),
        ("geventstalk/wire/stats.py", "import geventstalk.http.views"),
        ("geventstalk/turn/turn.py", "def late() -> None:\n    import geventstalk.http.backend"),
        ("geventstalk/turn/replies.py", "import geventstalk.turn.turn"),
        ("geventstalk/turn/tasks.py", "import time"),
        ("geventstalk/turn/operations.py", "import geventstalk.turn.turn"),
        ("journal/log.py", "import journal.sqlite.log"),
        ("journal/tools.py", "def late() -> None:\n    import journal.sqlite.survey"),
        ("journal/__init__.py", "import geventstalk.core.job"),
        ("journal/__init__.py", "import gevent"),
        ("journal/__init__.py", "import sqlite3"),
    ],
)
def test_a_wrong_import_is_found(copy: Path, module: str, line: str) -> None:
    path = copy / module
    sound = path.read_text(encoding="utf-8")
    path.write_text(f"{sound}\n\n{line}\n", encoding="utf-8")
    try:
        result = lint(copy)
    finally:
        path.write_text(sound, encoding="utf-8")
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"Contracts: \d+ kept, [1-9]\d* broken", result.stdout), result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.when_changed("pyproject.toml", "tests/test_layers.py")
def test_the_copy_is_sound(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_contracts_know_every_layer() -> None:
    """A new layer has to be given its place: above what it imports, below what imports it."""
    folders = {path.parent.name for path in (ROOT / "geventstalk").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "geventstalk").glob("*.py")}
    layers = re.findall(r"^layers = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    known = set(re.findall(r"geventstalk\.(\w+)", layers[0]))  # the others are those of modules of one layer
    assert folders <= known
    assert modules - known == {
        "__init__",
        "__main__",
        "_build",
        "_version",
        "config",
        "config_listeners",
        "config_policies",
        "config_schedules",
        "config_secrets",
        "config_values",
        "exits",
        "logs",
    }


def test_pywsgi_is_imported_in_one_file() -> None:
    """That file looks after all that gevent's server does by itself, such as printing tracebacks."""
    users = {source_id(path) for path in sources() if "pywsgi" in "".join(imports(parse(path)))}
    assert users == {"geventstalk/http/wire.py"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name} " for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name} " for alias in node.names)


def test_the_wall_clock_is_read_in_one_file() -> None:
    readers = {source_id(path) for path in sources() for _ in wall_clock_reads(parse(path))}
    assert len(readers) <= 1, readers


def wall_clock_reads(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in WALL_CLOCK:
                yield node
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (name for name in node.names if ("time", name.name) in WALL_CLOCK)


def test_wall_clock_reads_are_recognised() -> None:
    text = (
        "import time, datetime\nfrom time import time_ns\ntime.time()\ndatetime.datetime.now()\ntime.monotonic_ns()\n"
    )
    assert len(list(wall_clock_reads(ast.parse(text)))) == 3


def test_functions_fit_on_a_screen() -> None:
    functions = ((source_id(path), node) for path in sources() for node in functions_of(parse(path)))
    long = {(where, node.name): lines for where, node in functions if (lines := function_lines(node)) > LINES_MAX}
    assert not long


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_modules_open_with_a_short_header() -> None:
    headers = {source_id(path): (ast.get_docstring(parse(path)) or "").splitlines() for path in sources()}
    assert not [name for name, header in headers.items() if not 0 < len(header) <= HEADER_LINES_MAX]


def test_no_exception_vanishes() -> None:
    """No handler swallows everything without a word: a broken invariant would disappear in it."""
    handlers = (
        (source_id(path), node)
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and catches_all(node)
    )
    assert not [
        (where, node.lineno)
        for where, node in handlers
        if all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]


def catches_all(node: ast.ExceptHandler) -> bool:
    return node.type is None or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})


def shared_names(function: ast.FunctionDef, ours: set[str]) -> Iterator[str]:
    """Names under which a function catches exceptions of several types, one of them a class of ours."""
    types: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name and node.type:
            types.setdefault(node.name, set()).add(ast.unparse(node.type).rpartition(".")[2])
    return (name for name, found in types.items() if len(found) > 1 and found & ours)


# Bug: Compiled, a fault that had changed nothing ended the server instead of one connection.
def test_a_caught_exception_of_ours_shares_its_name_with_no_other() -> None:
    """mypyc gives a name one type within a function: the second exception of that name is a TypeError, compiled."""
    trees = [parse(ROOT / f"{name}.py") for name in sorted(compiled_modules())]
    ours = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert "ProtocolError" in ours and len(functions) > 100
    assert not [(each.name, name) for each in functions for name in shared_names(each, ours)]


def closures_for_threads(function: ast.FunctionDef) -> Iterator[str]:
    """Returns the closures that a function hands to another thread."""
    nested = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function}
    for call in ast.walk(function):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("submit", "spawn")
        ):
            for argument in call.args:
                if isinstance(argument, ast.Lambda) or (isinstance(argument, ast.Name) and argument.id in nested):
                    yield ast.unparse(argument)


# Bug: A compiled server with small segments ended with exit code 74.
def test_no_closure_of_a_compiled_module_goes_to_another_thread() -> None:
    """mypyc uses the memory of a closure again while another thread may still let go of what the closure held."""
    trees = [parse(ROOT / f"{name}.py") for name in sorted(compiled_modules())]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [(each.name, found) for each in functions for found in closures_for_threads(each)]
    example = ast.parse("def f(self):\n    def work(): pass\n    self.worker.submit(work, lambda: self)").body[0]
    assert isinstance(example, ast.FunctionDef)
    assert list(closures_for_threads(example)) == ["work", "lambda: self"]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
