"""The shipped parts and their starts: the wheel, pure and compiled, the clone's own environment, scripts, the image."""

from __future__ import annotations

import email.message
import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients.programs import missing
from tests.support.compiled import (
    BuildFailed,
    build,
    check_compiled,
    clone,
    has_compiler,
    unpacked,
    wheel_names,
    when_the_build_changed,
)
from tests.support.process import ROOT, ServerProcess, free_port

MAKE_LIMIT_S = 600
"""What a build, or the tests of one, may take where other tests take the processors meanwhile."""
SHELL_SCRIPTS = (
    *("scripts/run", "scripts/test", "scripts/environment", "scripts/places.sh", "scripts/package", ".ci/run"),
    *("debian/geventstalk.postinst", "debian/geventstalk.prerm", "debian/geventstalk.postrm"),
)


def run(
    command: Sequence[str | Path], cwd: Path, timeout_s: float = 120, environment: dict[str, str] | None = None
) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", clone(folder / "tree"), folder / "dist")


@pytest.fixture(scope="module")
def sdist_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what a source archive holds."""
    folder = tmp_path_factory.mktemp("sdist")
    return unpacked(build("sdist", clone(folder / "tree"), folder / "dist"), folder / "unpacked")


@pytest.fixture
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


@when_the_build_changed
@pytest.mark.slow
def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in wheel_names(wheel) if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for top in ("geventstalk", "journal") for path in (ROOT / top).rglob("*.py")}
    console = ROOT / "geventstalk" / "http" / "console"
    sources |= {str(path.relative_to(ROOT)) for path in console.rglob("*") if path.is_file()}
    others = {"geventstalk/py.typed", "geventstalk/http/openapi.yaml", "journal/py.typed"}
    assert names == sources | others


@when_the_build_changed
@pytest.mark.slow
def test_the_wheel_says_what_it_needs(metadata: email.message.Message) -> None:
    namespace: dict[str, str] = {}
    exec((ROOT / "geventstalk" / "_version.py").read_text(), namespace)
    assert metadata["Name"] == "geventstalk"
    assert metadata["Version"] == namespace["__version__"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    needs = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = sorted(re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for line in needs)
    assert " ".join(names) == "click cronsim falcon gevent google-re2 mypy_extensions prometheus_client pyyaml rich"


@when_the_build_changed
@pytest.mark.slow
def test_the_wheel_works_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        (entry,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert "geventstalk = geventstalk.cli.main:main" in entry.splitlines()
    place = {"PYTHONPATH": str(tmp_path / "site")}
    program = "import geventstalk.cli.main, journal; print(geventstalk.__file__, journal.__file__)"
    found = run([sys.executable, "-c", program], cwd=tmp_path, environment=place)
    assert found.split() == [str(tmp_path / "site" / name / "__init__.py") for name in ("geventstalk", "journal")]
    assert run([sys.executable, "-m", "geventstalk", "-v"], cwd=tmp_path, environment=place).startswith("geventstalk ")


@when_the_build_changed
@pytest.mark.slow
def test_a_source_archive_makes_the_same_wheel(wheel: Path, sdist_tree: Path, tmp_path: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    again = build("wheel", sdist_tree, tmp_path / "again")
    assert (again.name, wheel_names(again)) == (wheel.name, wheel_names(wheel))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * MAKE_LIMIT_S)
def test_a_source_archive_holds_what_compiling_needs(wheel: Path, sdist_tree: Path, tmp_path: Path) -> None:
    """Every run compiles a clone, see `test_run`."""
    if not has_compiler():
        missing("a C compiler with Python's headers is not installed")
    compiled = build("wheel", sdist_tree, tmp_path / "dist", compile="1", environment={"CFLAGS": "-O0"})
    check_compiled(compiled, wheel_names(wheel))


@when_the_build_changed
class TestCompileOrNot:
    """The conditions under which a wheel is compiled, and the messages about that."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        return clone(tmp_path / "tree")

    def bdist(self, tree: Path, **environment: str) -> tuple[int, list[str]]:
        """Makes a wheel without a compiler, unless CC is given; exit code, and what setup.py itself says of it."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "setup.py", "-q", "bdist_wheel"],
            cwd=tree,
            env={**os.environ, "GEVENTSTALK_COMPILE": "", "CC": "/nowhere/cc", **environment},
            capture_output=True,
            text=True,
            timeout=MAKE_LIMIT_S,
            check=False,
        )
        return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("geventstalk: ")]

    def cc(self, folder: Path, text: str) -> str:
        """A compiler that does what the shell is told here."""
        program = folder / "cc"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return str(program)

    @pytest.mark.slow
    def test_without_a_compiler_it_stays_pure_and_says_so_in_a_line(self, tree: Path) -> None:
        code, (line,) = self.bdist(tree)
        assert (code, line[:56]) == (0, "geventstalk: the core stays pure Python: no C compiler: ")
        assert [path.name.split("-", 2)[2] for path in (tree / "dist").iterdir()] == ["py3-none-any.whl"]

    @pytest.mark.slow
    def test_without_pythons_headers_it_says_that(self, tree: Path, tmp_path: Path) -> None:
        missing = "probe.c:1:10: fatal error: Python.h: No such file or directory"
        code, (line,) = self.bdist(tree, CC=self.cc(tmp_path, f"echo '{missing}' >&2; exit 1"))
        assert (code, line.endswith(missing)) == (0, True)
        assert len(list((tree / "dist").iterdir())) == 1

    @pytest.mark.slow
    @pytest.mark.long
    def test_a_compiler_that_fails_later_leaves_a_pure_wheel(self, tree: Path, tmp_path: Path) -> None:
        code, (line,) = self.bdist(tree, CC=self.cc(tmp_path, 'case "$*" in *probe.c*) exit 0 ;; *) exit 1 ;; esac'))
        assert (code, line) == (0, "geventstalk: the core stays pure Python: the C compiler fails, see above")
        (wheel,) = (tree / "dist").iterdir()
        assert wheel.name.endswith("-py3-none-any.whl")
        assert not [name for name in wheel_names(wheel) if name.endswith((".so", ".c"))]

    def test_an_error_where_it_must_be_compiled(self, tree: Path) -> None:
        code, (line,) = self.bdist(tree, GEVENTSTALK_COMPILE="1")
        assert (code, line[:56]) == (1, "geventstalk: the core cannot be compiled: no C compiler:")
        assert not (tree / "dist").exists()

    @pytest.mark.slow
    def test_nothing_is_said_where_it_must_not_be_compiled(self, tree: Path) -> None:
        assert self.bdist(tree, GEVENTSTALK_COMPILE="0") == (0, [])

    def test_a_wish_that_is_none(self, tree: Path) -> None:
        said = "geventstalk: GEVENTSTALK_COMPILE is neither 0 nor 1: yes"
        assert self.bdist(tree, GEVENTSTALK_COMPILE="yes") == (1, [said])

    @pytest.mark.slow
    def test_mypy_is_asked_for_where_there_is_a_compiler(self, tree: Path, tmp_path: Path) -> None:
        program = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
        cc = self.cc(tmp_path, "exit 0")
        for environment, needed in (
            ({"CC": cc}, "['mypy>=2.4']"),
            ({"CC": cc, "GEVENTSTALK_COMPILE": "0"}, "[]"),
            ({"CC": "/nowhere/cc"}, "[]"),
        ):
            words = [sys.executable, "-W", "ignore", "-c", program]
            said = run(words, cwd=tree, environment={"GEVENTSTALK_COMPILE": "", **environment})
            assert said.splitlines()[-1] == needed

    @pytest.mark.slow
    def test_a_compiled_wheel_needs_the_packed_memory_it_is_compiled_for(self, tree: Path, tmp_path: Path) -> None:
        """Each version of it may lie in memory in another way. The pure build does without."""
        major, minor = version("librt").split(".")[:2]
        cc = self.cc(tmp_path, "exit 0")
        for number, (environment, needed) in enumerate(
            [
                ({"CC": cc}, [f"librt<{major}.{int(minor) + 1},>={version('librt')}"]),
                ({"CC": cc, "GEVENTSTALK_COMPILE": "0"}, []),
                ({"CC": "/nowhere/cc"}, []),
            ]
        ):
            place = tmp_path / str(number)
            place.mkdir()
            program = (
                f"from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('{place}'))"
            )
            words = [sys.executable, "-W", "ignore", "-c", program]
            name = run(words, cwd=tree, environment={"GEVENTSTALK_COMPILE": "", **environment}).splitlines()[-1]
            text = email.parser.Parser().parsestr((place / name / "METADATA").read_text())
            assert [line for line in text.get_all("Requires-Dist", []) if "librt" in line] == needed

    @pytest.mark.slow
    def test_an_editable_install_stays_pure(self, tree: Path, tmp_path: Path) -> None:
        with pytest.raises(BuildFailed, match="no C compiler"):
            build("wheel", tree, tmp_path / "wheel", compile="1", environment={"CC": "/nowhere/cc"})
        build("editable", tree, tmp_path / "editable", compile="1", environment={"CC": "/nowhere/cc"})
        assert not list(tree.rglob("*.so"))


def test_there_is_one_place_of_metadata() -> None:
    """Beside setup.py a [project] table, in pyproject.toml or setup.cfg, would silently drop the requirements."""
    assert not re.search(r"^\[project\b", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert not (ROOT / "setup.cfg").exists()


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shellcheck(script: str) -> None:
    run([shutil.which("shellcheck") or missing("shellcheck is not installed"), "-x", script], cwd=ROOT)


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions and what stands behind each."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in lines]


@when_the_build_changed
@pytest.mark.slow
def test_the_image_is_built_from_what_its_wheel_needs(wheel: Path, tmp_path: Path) -> None:
    """The short form of test_the_image: what the Dockerfile copies is in its context and makes the wheel."""
    context = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split() for name, rest in dockerfile() if name == "COPY" and not rest.startswith("--from")]
    tree = tmp_path / "tree"
    tree.mkdir()
    for *sources, to in copied:
        for source in sources:
            assert source in context
            path = ROOT / source
            if path.is_dir():
                shutil.copytree(path, tree / to, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy2(path, tree / source)
    assert wheel_names(build("wheel", tree, tmp_path / "dist")) == wheel_names(wheel)


@pytest.mark.slow
def test_the_images_health_check_asks_the_server(start_server: Callable[..., ServerProcess]) -> None:
    """The short form of test_the_image: what the Dockerfile says of the program and of its health holds."""
    said = dict(dockerfile())
    assert json.loads(said["ENTRYPOINT"]) == ["geventstalk"]
    assert json.loads(said["CMD"])[0] == "-b" and said["VOLUME"] == json.loads(said["CMD"])[1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", said["USER"]), "a number other than root's"
    _, program, *words = json.loads(said["HEALTHCHECK"][said["HEALTHCHECK"].index("[") :])
    server = start_server()
    for port, code in ((server.port, 0), (free_port(), 1)):
        environment = {**os.environ, "GEVENTSTALK_PORT": str(port)}
        done = subprocess.run([sys.executable, program, *words], env=environment, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_image() -> None:
    """scripts/check-image, from Debian's packages where that is possible, otherwise from the Dockerfile's own base."""
    if shutil.which("podman") is None and shutil.which("docker") is None:
        missing("podman or docker is not installed")
    from_debian = os.geteuid() == 0 and shutil.which("mmdebstrap") is not None
    output = run([ROOT / "scripts" / "check-image", *(["--debian-base"] if from_debian else [])], ROOT, timeout_s=600)
    assert "SIGTERM ends it at once" in output
