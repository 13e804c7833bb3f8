"""scripts/package: what its archives and its Debian package hold, and the life of that package on a machine."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from geventstalk import exits
from geventstalk.config import load
from tests.clients.programs import missing
from tests.support.compiled import PACKAGES, clone, compiled_modules, wheel_names
from tests.support.process import ROOT, ServerProcess
from tests.support.wire import Client

DEBIAN = ROOT / "debian"
DATA = "/var/lib/geventstalk"
SETTINGS = "/etc/geventstalk/geventstalk.yaml"
WORKFLOWS = ROOT / ".github" / "workflows"
GETTING_STARTED = ROOT / "docs" / "getting-started.md"
OUTPUTS = ("name", "digest")
RELEASE_WRITES = ["attestations", "contents", "id-token", "packages"]
BUILD_LIMIT_S = 900
VENV_LIMIT_S = 300
SYSTEM_PYTHON = "/usr/bin/python3"


def load_yaml(path: Path) -> dict[str, Any]:
    text: dict[str, Any] = yaml.safe_load(path.read_text())
    return text


def load_program() -> Any:
    """The program as a module; scripts is no package."""
    spec = importlib.util.spec_from_file_location("geventstalk_package", ROOT / "scripts" / "package.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


package: Any = load_program()


def control() -> dict[str, str]:
    """The fields of the binary package, and before them those of the source."""
    text = (DEBIAN / "control").read_text().replace("\n ", " ")
    return dict(re.findall(r"^([A-Z][\w-]*): (.*)$", text, re.MULTILINE))


def test_the_archives_hold_what_the_image_is_built_from() -> None:
    """test_packaging.py makes the wheel and the source archive of these files, and looks into them."""
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(package.SOURCES) == sorted(name for names in copied for name in names.split())
    assert {*PACKAGES} < {*package.SOURCES}


def test_the_unit_of_the_package_differs_where_it_has_to() -> None:
    """Type=notify, the watchdog and the sandbox are those of conf/, see test_systemd.py."""
    ours = (ROOT / "conf" / "geventstalk.service").read_text()
    theirs = package.changed(ours, package.UNIT_CHANGES)
    directives = [line for line in theirs.splitlines() if line and not line.startswith("#")]
    assert [line for line in directives if line not in ours.splitlines()] == [
        f"ExecStart=/usr/bin/geventstalk --config {SETTINGS}"
    ]
    gone = [line for line in ours.splitlines() if line[:1] != "#" and line not in theirs.splitlines()]
    assert [line.split("=")[0] for line in gone] == ["ExecStart", "Environment", "Environment", "DynamicUser"]
    assert "/opt/" not in theirs and "%S" not in theirs


def test_the_settings_of_the_package_serve_this_host_from_its_directory(tmp_path: Path) -> None:
    found = []
    for name, changes in (("ours", ()), ("theirs", package.SETTINGS_CHANGES)):
        path = tmp_path / name
        path.write_text(package.changed((ROOT / "conf" / "geventstalk.yaml").read_text(), changes))
        found.append(vars(load({}, {"GEVENTSTALK_CONFIG": str(path)})[0]))
    ours, theirs = found
    assert {key: value for key, value in theirs.items() if value != ours[key]} == {"journal": DATA}
    assert theirs["listen"] == ("127.0.0.1",)


def test_a_change_that_fits_no_more_is_an_error() -> None:
    """Otherwise an edit of conf/ would make a package whose server listens elsewhere."""
    for text in ("Type=notify\n", "User=a\nUser=b\n"):
        with pytest.raises(package.Failed, match="has to fit once"):
            package.changed(text, [("(?m)^User=.*", "User=c")])


def test_the_scripts_of_the_package_and_the_unit_name_one_user_and_one_directory() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "conf" / "geventstalk.service").read_text(), re.MULTILINE))
    assert f"/var/lib/{unit['StateDirectory']}" == DATA
    begin = (DEBIAN / "geventstalk.postinst").read_text()
    assert re.search(rf"^ *adduser --quiet --system --group .*--home {DATA} {unit['User']}$", begin, re.MULTILINE)
    assert f"-m {unit['StateDirectoryMode']} {DATA}\n" in begin


@pytest.mark.parametrize("word", ["remove", "upgrade", "failed-upgrade", "abort-install", "abort-upgrade", "purge"])
def test_only_a_purge_deletes_the_journal(word: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "journal").mkdir(parents=True)
    (data / "journal" / ".hidden").touch()
    script = (DEBIAN / "geventstalk.postrm").read_text().replace(DATA, str(data))
    said("sh", "-c", script, "postrm", word)
    assert data.exists() == (data / "journal" / ".hidden").exists() == (word != "purge")
    if word == "purge":
        said("sh", "-c", script, "postrm", word)  # of what is not there any more


def test_a_purge_keeps_the_mount_point_of_a_disk(tmp_path: Path) -> None:
    """An error would leave the package half removed."""
    (tmp_path / "data" / "journal").mkdir(parents=True)
    (tmp_path / "rmdir").write_text("#!/bin/sh\necho Device or resource busy >&2\nexit 1\n")
    (tmp_path / "rmdir").chmod(0o755)
    script = (DEBIAN / "geventstalk.postrm").read_text().replace(DATA, str(tmp_path / "data"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert said("sh", "-c", script, "postrm", "purge", environment={"PATH": path}) == ""
    assert [*(tmp_path / "data").iterdir()] == []


def test_the_package_says_of_itself_what_setup_py_says() -> None:
    setup = (ROOT / "setup.py").read_text()
    (author,) = re.findall(r'"author": "(.*)"', setup)
    assert control()["Package"] == control()["Source"] == re.findall(r'"name": "(.*)"', setup)[0]
    assert control()["Maintainer"].startswith(f"{author} <")
    assert f"(c) {author}\n" in (ROOT / "LICENSE").read_text()


def test_the_manual_names_exit_codes_that_there_are() -> None:
    text = (DEBIAN / "manual").read_text()
    codes = {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    named = {int(number) for number in re.findall(r"\b(\d+) (?:after|where|for)\b", text)}
    assert named <= codes and len(named) >= 6
    assert SETTINGS in text and DATA in text


# Bug: A Python that was built in a home folder left the path of it as the RUNPATH of each compiled module.
def test_what_is_compiled_does_not_look_for_libraries_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"LDSHARED": "gcc -shared -L/opt/libs -Wl,-rpath,/opt/libs -Wl,-rpath=/b -Wl,-O1"}
    monkeypatch.setattr("sysconfig.get_config_var", words.get)
    assert package.linker() == "gcc -shared -L/opt/libs -Wl,-O1"


class TestMain:
    """The program, without what it takes minutes to make."""

    @pytest.fixture(autouse=True)
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Returns what is made, each with what it is made from."""
        made: list[str] = []

        def make(kind: str) -> Callable[..., str]:
            def record(work: Path, *sources: str) -> str:
                made.append(" ".join((kind, *sources)))
                return kind

            return record

        for kind in ("sdist", "wheel", "deb"):
            monkeypatch.setattr(package, f"make_{kind}", make(kind))
        monkeypatch.setattr(package, "container_engine", lambda: None)
        monkeypatch.setattr(package, "run", lambda *words: made.append(words[0]))
        monkeypatch.setattr("sys.base_prefix", "/usr")
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
        return made

    @pytest.fixture
    def main(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
        def main(*words: str) -> int:
            monkeypatch.setattr("sys.argv", ["package", *words])
            code: int = package.main()
            return code

        return main

    @pytest.mark.parametrize(
        "words, expected",
        [
            ("", ["dpkg-checkbuilddeps", "sdist", "wheel sdist 0", "wheel sdist 1", "deb wheel"]),
            ("sdist", ["sdist"]),
            ("wheel pure", ["sdist", "wheel sdist 0", "wheel sdist 1"]),
            ("deb", ["dpkg-checkbuilddeps", "sdist", "wheel sdist 1", "deb wheel"]),
        ],
    )
    def test_each_is_made_with_what_it_needs(
        self, made: list[str], main: Callable[..., int], words: str, expected: list[str]
    ) -> None:
        """All of them where none is named, and no image where nothing can make it."""
        assert (main(*words.split()), made) == (0, expected)

    # Bug: podman left the health check out of the image, for which its own format has no place.
    def test_an_image_is_made_where_an_engine_answers(
        self, made: list[str], main: Callable[..., int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(package, "run", lambda *words: made.append(" ".join(map(str, words))))
        for engine, options in (("docker", ""), ("podman", " --format=docker")):
            monkeypatch.setattr(package, "container_engine", lambda engine=engine: engine)
            made.clear()
            assert (main("image"), made) == (0, [f"{engine} build{options} --tag geventstalk {ROOT}"])
            assert main() == 0 and made[-1].startswith(engine)

    def test_what_cannot_be_made_here_stops_before_anything_is_made(
        self,
        made: list[str],
        main: Callable[..., int],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert (main("sdist", "image"), made) == (1, [])
        assert capsys.readouterr().err == "geventstalk: neither docker nor podman answers, so there is no image\n"
        monkeypatch.setattr("sys.base_prefix", "/opt/python")
        assert (main("deb"), made) == (1, ["dpkg-checkbuilddeps"])
        assert "try PYTHON=/usr/bin/python3" in capsys.readouterr().err

    # Bug: A failure whose text had the word "image" in it, such as a path, ended with 0.
    def test_what_fails_is_a_failure_whatever_it_says(
        self, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def make_sdist(work: Path) -> None:
            raise package.Failed("/srv/image/geventstalk: no space")

        monkeypatch.setattr(package, "make_sdist", make_sdist)
        assert main() == 1
        assert capsys.readouterr().err.splitlines()[-1] == "geventstalk: /srv/image/geventstalk: no space"

    # Bug: Where git did not answer, the archives carried the time of now.
    def test_archives_carry_the_time_of_the_last_commit(
        self, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(package, "run", lambda *words: f"{words[0]}\n")
        assert (main("sdist"), os.environ["SOURCE_DATE_EPOCH"]) == (0, "1")
        monkeypatch.delenv("SOURCE_DATE_EPOCH")
        assert (main("sdist"), os.environ["SOURCE_DATE_EPOCH"]) == (0, "git")

    def test_a_name_of_nothing(self, made: list[str], main: Callable[..., int]) -> None:
        assert (main("pure", "rpm"), made) == (5, [])


# Bug: The sums were those of one run, and did not name what was made before.
def test_the_sums_are_of_all_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(package, "DIST", tmp_path / "dist")
    for kind in ("pure", "sdist"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / kind).write_text(kind)
        package.publish(tmp_path / kind)
    sums = (tmp_path / "dist" / "SHA256SUMS").read_text()
    assert sums == "".join(f"{hashlib.sha256(kind.encode()).hexdigest()}  {kind}\n" for kind in ("pure", "sdist"))


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(package.Failed, match="exit code 3\nout\nerr\n"):
        package.run("sh", "-c", "echo out; echo err >&2; exit $CODE", CODE="3")


class TestWorkflows:
    """.github/workflows, without GitHub. There, tests.yml runs actionlint over both."""

    @staticmethod
    def jobs(name: str) -> dict[str, dict[str, Any]]:
        jobs: dict[str, dict[str, Any]] = load_yaml(WORKFLOWS / name)["jobs"]
        return jobs

    @pytest.mark.parametrize("name", sorted(path.name for path in WORKFLOWS.iterdir()))
    def test_each_step_can_be_run(self, name: str) -> None:
        """Actions have a version, shell is shell, and what the expressions name is there."""
        jobs = self.jobs(name)
        for job in jobs.values():
            assert {*([job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", []))} <= {*jobs}
            matrix = job.get("strategy", {}).get("matrix", {})
            known = {f"matrix.{key}" for entry in (matrix, *matrix.get("include", [])) for key in entry}
            known |= {f"steps.{step['id']}.outputs.{key}" for step in job["steps"] if "id" in step for key in OUTPUTS}
            assert {*re.findall(r"\$\{\{ (\S+) \}\}", str(job))} <= known | {"secrets.GITHUB_TOKEN"}
            assert job["timeout-minutes"] <= 120
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                assert re.fullmatch(r"actions/[\w-]+@v\d+|docker://[\w/]+:[\d.]+", step.get("uses", "actions/it@v1"))
                said("bash", "-n", "-c", step.get("run", ""))
                for script in re.findall(r"(?:^|\s)((?:scripts|\.ci)/\S+)", step.get("run", "")):
                    assert os.access(ROOT / script, os.X_OK), script

    def test_the_token_of_a_job_may_do_what_the_job_does_and_no_more(self) -> None:
        for name, may_write in (("tests.yml", {}), ("release.yml", {"image": ["packages"], "release": RELEASE_WRITES})):
            assert load_yaml(WORKFLOWS / name)["permissions"] == {"contents": "read"}
            jobs = self.jobs(name)
            found = {
                key: [area for area, kind in job["permissions"].items() if kind == "write"]
                for key, job in jobs.items()
                if "permissions" in job
            }
            assert found == may_write

    def test_a_release_has_wheels_for_each_python_processor_and_libc(self) -> None:
        jobs = self.jobs("release.yml")
        assert {*jobs["release"]["needs"]} == {*jobs} - {"release"}
        wheels = jobs["wheels"]
        (build,) = (step["env"]["CIBW_BUILD"] for step in wheels["steps"] if "env" in step)
        pythons = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "setup.py").read_text())
        assert build == f"cp3{{{','.join(pythons)}}}-${{{{ matrix.libc }}}}_*"
        assert wheels["strategy"]["matrix"]["libc"] == ["manylinux", "musllinux"]
        for job in ("wheels", "debian"):
            assert jobs[job]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]

    # Bug: dpkg asks for build-essential as well, which no field of debian/control names.
    def test_what_is_installed_before_a_package_is_built(self) -> None:
        build = {word.split()[0].removesuffix("-compat") for word in control()["Build-Depends"].split(", ")}
        steps = self.jobs("release.yml")["debian"]["steps"]
        places = [
            *(step["run"] for step in steps if "--no-install" in step.get("run", "")),
            *re.findall(r"^sudo apt-get install .*debhelper.*$", GETTING_STARTED.read_text(), re.MULTILINE),
            *re.findall(r"--long.*\((.*debhelper.*)\)", (ROOT / ".ci" / "run").read_text()),
        ]
        assert len(places) == 3
        for place in places:
            assert (build | {"build-essential"}) - {"python3"} <= {*place.split()}, place


def needs(*names: str) -> None:
    for name in names:
        if shutil.which(name) is None:
            missing(f"{name} is not installed")


def said(
    *words: str | Path, code: int = 0, cwd: Path = ROOT, timeout_s: float = 120, environment: Mapping[str, str] = {}
) -> str:
    """Returns what the command prints, also as errors."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@contextmanager
def debian_root(root: Path) -> Iterator[Path]:
    """A Debian with what the package asks for and nothing else."""
    with Path("/etc/os-release").open() as file:
        (release,) = re.findall(r"^VERSION_CODENAME=(\w+)$", file.read(), re.MULTILINE)
    packages = "--include=adduser,python3"
    said("mmdebstrap", "--quiet", "--variant=minbase", packages, release, root, timeout_s=400)
    try:
        yield root
    finally:
        shutil.rmtree(root)


def newer(deb: Path, folder: Path) -> Path:
    """The same package as a later version."""
    said("dpkg-deb", "--raw-extract", deb, folder)
    text = (folder / "DEBIAN" / "control").read_text()
    (folder / "DEBIAN" / "control").write_text(re.sub("(?m)^(Version: .*)", r"\1+later", text))
    said("dpkg-deb", "--build", "--root-owner-group", folder, f"{folder}.deb")
    return Path(f"{folder}.deb")


def check_libraries(folder: Path) -> None:
    """Fails where a library would look for others in a place of the machine that built it."""
    for path in folder.rglob("*.so*"):
        for place in re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", said("readelf", "-d", path)):
            assert place.startswith("$ORIGIN"), (path, place)


@contextmanager
def serving(command: Sequence[str | Path]) -> Iterator[Client]:
    """A client of this server, which has to end as asked."""
    server = ServerProcess([str(word) for word in command]).wait_ready()
    with Client(server.connect()) as client:
        yield client
    assert server.stop() == 0


def check_use(client: Client) -> None:
    assert client.put(b"a job") == 1
    assert client.ask(b"reserve-with-timeout 0") == b"RESERVED 1 5\r\na job\r\n"
    assert client.ask(b"delete 1") == b"DELETED\r\n"


def check_archive(archive: Path, folder: Path, build: str) -> None:
    """Installs it into an environment of its own with pip, and uses it from there."""
    said(SYSTEM_PYTHON, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pure = {"GEVENTSTALK_COMPILE": "0"}
    said(python, "-m", "pip", "-q", "install", archive, timeout_s=VENV_LIMIT_S, environment=pure)
    assert said(folder / "bin" / "geventstalk", "-v", cwd=folder).endswith(f" ({build})\n")
    with serving([python, "-I", "-m", "geventstalk"]) as client:
        check_use(client)


class Installed:
    """The package in a root of Debian."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *words: str | Path, code: int = 0) -> str:
        return said("chroot", self.root, *words, code=code)

    def install(self, deb: Path) -> None:
        """As a user does; what it needs is there already."""
        shutil.copy(deb, self.root)
        self.run("apt-get", "-qy", "install", f"/{deb.name}")

    def files(self) -> set[str]:
        """The topmost files of the package that are there, but for what dpkg knows of it."""
        found = {path for top in ("etc", "usr", "var/lib") for path in (self.root / top).rglob("*geventstalk*")}
        top = {path for path in found if not found & {*path.parents}}
        return {f"/{path.relative_to(self.root)}" for path in top if "dpkg" not in path.parts}

    def serving(self) -> AbstractContextManager[Client]:
        """A client of what the unit starts, as its user."""
        (unit,) = self.root.glob("lib/systemd/system/geventstalk.service")
        (command,) = re.findall("^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        user = ":".join(self.run("id", flag, "geventstalk").strip() for flag in ("-u", "-g"))
        return serving(["chroot", f"--userspec={user}", self.root, *command.split()])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * BUILD_LIMIT_S)
def test_each_archive_of_a_release_is_installed_and_used(tmp_path: Path) -> None:
    """From a clone to the purge of its package, with a compiler that is told not to care for speed."""
    if os.geteuid() != 0:
        missing("root is not this user")
    needs("dh", "help2man", "lintian", "mmdebstrap", "readelf", SYSTEM_PYTHON)
    tree = clone(tmp_path / "tree")
    environment = {"CFLAGS": "-O0", "PYTHON": SYSTEM_PYTHON, "SOURCE_DATE_EPOCH": "1790000000"}
    kinds = ("sdist", "pure", "wheel", "deb")
    said(tree / "scripts" / "package", *kinds, timeout_s=BUILD_LIMIT_S, environment=environment)
    dist = tree / "dist"
    assert said("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=dist).count(": OK\n") == len(kinds)
    (deb,) = dist.glob("geventstalk_*.deb")
    (pure,) = dist.glob("*-py3-none-any.whl")
    (wheel,) = dist.glob("*-manylinux*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    names = {name for name in wheel_names(wheel) if not name.endswith("/")}  # auditwheel has entries for folders, too
    compiled = {name for name in names if name.endswith(".so")}
    assert {name.partition(".")[0] for name in compiled} == {"geventstalk/compiled__mypyc", *compiled_modules()}
    assert names - compiled == wheel_names(pure)
    for archive, build in ((sdist, "pure"), (pure, "pure"), (wheel, "compiled")):
        check_archive(archive, tmp_path / archive.name, build)
    assert said("lintian", "--tag-display-limit=0", "--allow-root", deb) == ""
    with debian_root(tmp_path / "root") as root:
        check_package(Installed(root), deb, tmp_path)


def check_package(installed: Installed, deb: Path, folder: Path) -> None:
    """Installs it, serves, upgrades, serves, removes, purges."""
    root = installed.root
    installed.install(deb)
    check_libraries(root / "usr" / "lib" / "geventstalk")
    assert installed.run("geventstalk", "-v").endswith(" (compiled)\n")
    state = root / DATA[1:]
    assert f"{state.stat().st_mode:o}" == "40700"
    assert str(state.stat().st_uid) == installed.run("id", "-u", "geventstalk").strip()
    for place in ("usr/share/man/man1/geventstalk.1.gz", *package.COMPLETIONS.values()):
        assert (root / place).is_file()
    with installed.serving() as client:
        check_use(client)
        assert client.put(b"kept") == 2
    with (root / SETTINGS[1:]).open("a") as file:
        file.write("# mine\n")
    installed.install(newer(deb, folder / "newer"))
    assert "+later" in installed.run("dpkg-query", "--show", "geventstalk")
    assert (root / SETTINGS[1:]).read_text().endswith("# mine\n")
    with installed.serving() as client:
        assert client.ask(b"reserve-with-timeout 0") == b"RESERVED 2 4\r\nkept\r\n"
    installed.run("apt-get", "-qy", "remove", "geventstalk")
    # Debian keeps with the settings whether the service is to start.
    assert {name for name in installed.files() if "systemd" not in name} == {"/etc/geventstalk", DATA}
    assert [*state.iterdir()]
    installed.run("apt-get", "-qy", "purge", "geventstalk")
    assert installed.files() == set()
