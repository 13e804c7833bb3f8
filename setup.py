"""The only place of geventstalk's metadata, and of what is compiled; pyproject.toml names the build system.

A [project] table beside this file would silently drop install_requires, so there must never be one.

A wheel's core is compiled by mypyc where a C compiler is present. Otherwise, and with GEVENTSTALK_COMPILE=0, all of it
is pure Python. With GEVENTSTALK_COMPILE=1 a core that cannot be compiled is an error. An editable install stays pure.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BoundedSemaphore
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

HERE = Path(__file__).resolve().parent

MODULES = {
    "geventstalk": ["_build", "backoff", "globs", "limits", "policies", "rights", "stream", "tags"],
    "geventstalk/core": [
        "ages",
        "bodies",
        "dispatch",
        "due",
        "engine",
        "figures",
        "job",
        "jobtable",
        "line",
        "listing",
        "meter",
        "mirror",
        "operate",
        "order",
        "packed",
        "plain",
        "rules",
        "shares",
        "state",
        "timerwheel",
        "trail",
        "tube",
        "undo",
    ],
    "geventstalk/durable": ["follow", "large", "reading", "records", "store"],
    "geventstalk/front": ["frames", "front"],
    "geventstalk/serving": [
        "busy_poll",
        "clustered",
        "connection",
        "driver",
        "fronts",
        "link",
        "parking",
        "runqueue",
        "server",
    ],
    "geventstalk/turn": [
        "leader",
        "maintenance",
        "operations",
        "queue",
        "replies",
        "returns",
        "syncs",
        "tasks",
        "turn",
    ],
    "geventstalk/wire": [
        "added",
        "arriving",
        "batches",
        "commands",
        "guarded",
        "protocol",
        "session",
        "stats",
        "verb",
        "verbs",
    ],
    "journal": ["batched", "liveness", "log", "packed", "parts", "plain", "shared"],
    "journal/postgres": ["compaction", "format", "log", "replay", "sizing", "writer"],
    "journal/sqlite": [
        "bodies",
        "compaction",
        "files",
        "format",
        "hints",
        "log",
        "payloads",
        "reader",
        "repair",
        "replay",
        "sealed",
        "segments",
        "sizing",
        "space",
        "sql",
        "wal",
        "watermark",
        "writer",
    ],
}
"""What is compiled. Its shared library is geventstalk/compiled__mypyc; the .py files stay beside it, for tracebacks."""
ON_THE_WAY = re.compile(
    r"__native_(geventstalk___stream|geventstalk___(core|wire)___\w+|geventstalk___(turn___(replies|turn)|durable___(records|store)|serving___connection)"
    r"|journal___(liveness|sqlite___(log|segments|writer)))"
)
"""The names of C sources of modules that call each other for each command. They become one, with mypyc's runtime."""
SHIM = """\
#define NULL ((void *)0)
#define Py_DECREF Py_DecRef
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *
typedef struct _object PyObject;
extern void Py_DecRef(PyObject *), PyErr_Clear(void), *PyCapsule_GetPointer(PyObject *, const char *);
extern PyObject *Py_BuildValue(const char *, ...), *PyObject_GetAttrString(PyObject *, const char *);
extern PyObject *PyImport_ImportModuleLevel(const char *, PyObject *, PyObject *, PyObject *, int);
"""
"""The declarations of Python.h that the libraries of single modules need. All of Python.h takes a compiler longer."""
SELDOM = re.compile(
    r"__native_(geventstalk___((core___(ages|bodies|figures|mirror|operate|plain|undo)|wire___stats)|turn___(operations|leader)"
    r"|serving___(clustered|fronts))|journal___(postgres|sqlite___(files|hints|repair|sizing|space|wal|watermark))\w*)"
)
"""The names of C sources that no command passes through often. A compiler does less for them, in half the time."""
MYPYC = (2, 4)
"""The first mypy whose mypyc can be told that jobs are never part of a cycle (`acyclic`)."""


def version() -> str:
    """The version, read as text: importing the package would need what is not installed yet."""
    text = (HERE / "geventstalk" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('geventstalk/_version.py has no line __version__ = "..."')
    return found.group(1)


POSTGRES = ["psycopg[binary]>=3.2,<4"]
TEST = [
    *POSTGRES,
    "greenstalk>=2.1.1,<3",
    "hypothesis>=6.100",
    "jsonschema-rs>=0.30",
    "pystalk>=0.9",
    "pytest>=8.2",
    "pytest-timeout>=2.3.1",
    "pytest-xdist>=3.6",
    "schemathesis>=4.0",
    "selenium>=4.20",
    "setuptools>=77",
]
DEV = [
    "import-linter>=2.5",
    "mypy>=2.4",
    "ruff>=0.9",
    "types-gevent>=24.10",
    "types-PyYAML>=6.0.12",
]

# Regular expressions over bodies. Those of others can be made to run for hours, or out of memory, by ten characters.
# It has no wheel for musl, and to build it takes its C++ library: there the server says that it has none.
RE2 = [] if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "") else ["google-re2>=1.1.20240601,<2"]

METADATA: dict[str, Any] = {
    "name": "geventstalk",
    "version": version(),
    "description": "A work queue server that speaks the beanstalk protocol, with a durable journal",
    "long_description": (HERE / "README.md").read_text(encoding="utf-8"),
    "long_description_content_type": "text/markdown",
    "author": "the geventstalk authors",
    "license": "MIT",
    "license_files": ["LICENSE"],
    "keywords": ["beanstalkd", "beanstalk", "work queue", "job queue", "gevent"],
    "classifiers": [
        "Development Status :: 4 - Beta",
        "Environment :: No Input/Output (Daemon)",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        # CI runs the tests on 3.11, scripts/test --long on all it finds. test_run.py has not run on 3.12 and 3.13 yet.
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    "python_requires": ">=3.10",
    # A server has an environment of its own, so the next major version is let in on purpose, not by chance.
    "install_requires": [
        "click>=8.1,<9",  # the command line
        "cronsim>=2.6,<3",  # when a schedule is due, also where clocks are set forward and back
        "falcon>=4.0.2,<5",  # the API: routes and their errors
        "gevent>=24.10.1,<27",  # the event loop
        "mypy_extensions>=1.0,<2",  # the types of compiled modules
        "prometheus_client>=0.21,<1",  # the formats of /metrics
        "pyyaml>=6.0.1,<7",  # the configuration file
        "rich>=13.7,<16",  # tables and `top` of the commands for a running server; the server does not import it
        *RE2,
    ],
    "extras_require": {"postgres": POSTGRES, "test": TEST, "dev": TEST + DEV},
    # With this, an editable install is a line in a .pth file and not an import hook that costs a start 12 ms.
    "package_dir": {"": "."},
    "packages": find_packages(include=["geventstalk", "geventstalk.*", "journal", "journal.*"]),
    "package_data": {
        "geventstalk": ["py.typed"],
        "geventstalk.http": ["openapi.yaml", "console/*", "console/pages/*", "console/vendor/*"],
        "journal": ["py.typed"],
    },
    "include_package_data": False,
    "zip_safe": False,
    "entry_points": {"console_scripts": ["geventstalk = geventstalk.cli.main:main"]},
}


class CannotCompile(Exception):
    """The core stays pure Python; the message says why."""


class BuildCore(build_ext):
    """build_ext that keeps all cores busy, and whose failures can be told from others."""

    def build_extensions(self) -> None:
        """As the original, which compiles the sources of an extension, here some fifty, one after the other."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        free, compile = BoundedSemaphore(cores), self.compiler.compile

        def compile_one(source: str, *args: Any, **options: Any) -> list[str]:
            with free:
                if SELDOM.match(Path(source).name) and "-O" not in os.environ.get("CFLAGS", ""):
                    options = {**options, "extra_postargs": [*options["extra_postargs"], "-O1"]}
                made: list[str] = compile([source], *args, **options)
                return made

        def compile_all(sources: list[str], *args: Any, **options: Any) -> list[str]:
            # The largest first, so that at the end no core is alone with it.
            sources = sorted(sources, key=os.path.getsize, reverse=True)
            pool = ThreadPoolExecutor(cores)
            try:
                tasks = [pool.submit(compile_one, source, *args, **options) for source in sources]
                return [name for task in tasks for name in task.result()]
            finally:
                pool.shutdown(cancel_futures=True)  # after a failure the others need not begin

        self.compiler.compile = compile_all
        self.parallel = cores  # extensions are built at the same time as well
        super().build_extensions()

    def run(self) -> None:
        print("now: compiling the core", flush=True)
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            raise CannotCompile("the C compiler fails, see above") from error


def require_compiler() -> None:
    """Compiles an extension of two lines, which needs what the core does: compiler, linker and Python's headers."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nPyMODINIT_FUNC PyInit_probe(void) { return NULL; }\n")
        words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        words += ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(source), "-o", str(source) + ".so"]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"no C compiler: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"{words[0]} fails"]
        raise CannotCompile(f"the C compiler cannot build an extension: {errors[0].strip()}")


def core(folder: str) -> list[Any]:
    """The core's extensions, translated to C in this folder."""
    require_compiler()
    try:
        from mypy.version import __version__ as found
        from mypyc.build import mypycify
    except ImportError as error:
        raise CannotCompile(f"mypyc cannot be imported: {error}") from error
    if tuple(map(int, found.split(".")[:2])) < MYPYC:
        raise CannotCompile(f"mypy {found} is too old")
    files = [f"{package}/{module}.py" for package, modules in MODULES.items() for module in modules]
    print("now: translating the core to C", flush=True)  # scripts/build.py shows it
    try:
        # Without mypy's settings in pyproject.toml: those are for changes of the code, not for its installation.
        made: list[Any] = mypycify(
            ["--config-file=", "--ignore-missing-imports", *files],
            opt_level="2",
            debug_level="0",
            group_name="geventstalk.compiled",
            target_dir=folder,
            multi_file=True,
        )
    except (Exception, SystemExit) as error:  # also its own faults: there is another way
        raise CannotCompile(f"mypyc fails, see above: {error!r}") from error
    # A warning of a compiler that mypyc does not know is no reason to do without; and CFLAGS have the last word.
    unwanted = {"-Werror"} | ({"-O2"} if "-O" in os.environ.get("CFLAGS", "") else set())
    for extension in made:
        extension.extra_compile_args = [word for word in extension.extra_compile_args if word not in unwanted]
        # Nothing else calls the core's functions: so they call each other directly, a tenth fewer instructions in all.
        # The warning, which Python's own flags ask for, takes gcc half a minute in a source of 250,000 lines.
        extension.extra_compile_args += ["-fvisibility=hidden", "-Wno-misleading-indentation"]
        # The name of the group has a folder in it; the sources of the modules include its headers without that.
        extension.include_dirs.append(os.path.join(folder, "geventstalk"))
    put_together(made[0], folder)
    for extension in made[1:]:
        (shim,) = map(Path, extension.sources)
        shim.write_text(shim.read_text(encoding="utf-8").replace("#include <Python.h>\n", SHIM), encoding="utf-8")
    return made


def is_on_the_way(name: str) -> bool:
    """Returns whether the C source of this name becomes one with mypyc's runtime."""
    return ON_THE_WAY.fullmatch(name) is not None and SELDOM.match(name) is None


def put_together(extension: Any, folder: str) -> None:
    """Makes one source of those on the way of a command, so that the compiler can inline between modules there.

    All modules in one take a compiler three minutes, on one core. The others are compiled beside this one.
    """
    names = {source: Path(source).stem for source in extension.sources}
    way = [source for source, name in names.items() if is_on_the_way(name) or not name.startswith("__native")]
    way.sort(key=lambda source: names[source].startswith("__native"))  # the runtime first, as mypyc has it
    together = Path(folder, "together.c")
    together.write_text("\n".join(Path(source).read_text(encoding="utf-8") for source in way), encoding="utf-8")
    extension.sources = [str(together), *(source for source in names if source not in way)]


def runtime() -> list[str]:
    """Returns what a compiled core needs beside the rest: mypyc's packed memory, of the version that it is compiled
    for.
    """
    try:
        found = importlib.metadata.version("librt")
    except importlib.metadata.PackageNotFoundError:
        return []  # mypyc is not there either
    major, minor = found.split(".")[:2]
    return [f"librt>={found},<{major}.{int(minor) + 1}"]


def setup_with_core() -> None:
    """As setup(). Raises CannotCompile; then nothing was made."""
    # In a new folder: leftovers of another version in ./build would get into the wheel.
    with TemporaryDirectory() as folder:
        build = {"build": {"build_base": folder}}
        needed = [*METADATA["install_requires"], *runtime()]
        setup(
            **{**METADATA, "install_requires": needed},
            ext_modules=core(folder),
            cmdclass={"build_ext": BuildCore},
            options=build,
        )


def main() -> None:
    wish = os.environ.get("GEVENTSTALK_COMPILE", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"geventstalk: GEVENTSTALK_COMPILE is neither 0 nor 1: {wish}")
    if "egg_info" in sys.argv and wish != "0":
        # The question what a build needs. It is the same for an editable install, which needs nothing of this.
        with suppress(CannotCompile):  # the build says why
            require_compiler()
            METADATA["setup_requires"] = ["mypy>={}.{}".format(*MYPYC)]
    elif "dist_info" in sys.argv and wish != "0":
        with suppress(CannotCompile):  # the metadata of a wheel that is built next
            require_compiler()
            METADATA["install_requires"] += runtime()
    elif "bdist_wheel" in sys.argv and wish != "0":
        try:
            return setup_with_core()
        except CannotCompile as error:
            if wish == "1":
                raise SystemExit(f"geventstalk: the core cannot be compiled: {error}") from error
            print(f"geventstalk: the core stays pure Python: {error}", file=sys.stderr, flush=True)
    elif "editable_wheel" in sys.argv and wish == "1":
        print("geventstalk: an editable install stays pure Python", file=sys.stderr, flush=True)
    setup(**METADATA)


if __name__ == "__main__":
    main()
