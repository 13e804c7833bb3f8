"""The pages: links lead somewhere, and commands do what the pages say.

A block ```console is typed here, from the top of its page, in an empty directory: `...` stands for anything, `>` for
input that goes on, and a server runs until the next one starts. A block ```sh is typed here never: a comment above
it says why, or names the test that types it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from geventstalk.cli.program import LIVE
from geventstalk.config import KEYS
from journal.sqlite.format import FORMAT_VERSION
from tests.clients.programs import missing
from tests.support.process import GEVENTSTALK, free_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "tests").rglob("*.md"))]
BINLOG = ROOT / "tests" / "data" / "binlog-v7"
SPECIMENS = {"transcript", "ini", "json", "nginx", "text", "yaml"}
"""Languages of blocks that are looked at, and not typed."""
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?:not run: \S.*|run by (tests/\w+\.py)) -->")
PATIENCE_S = 60


class Block(NamedTuple):
    language: str
    text: str
    mark: str
    """The line above the block."""


class Example(NamedTuple):
    command: str
    more: str
    """What is typed behind the command, or printed by it."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        indent, language, inside = found.groups()
        above = text[: found.start()].rstrip("\n").rpartition("\n")[2].strip()
        yield Block(language, re.sub(f"^{indent}", "", inside, flags=re.MULTILINE), above)


def examples(block: str) -> Iterator[Example]:
    """Returns the commands of a block, and what follows each."""
    for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, more = example.partition("\n")
        while not command.startswith("nc ") and more.startswith("> "):
            line, _, more = more.partition("\n")
            command += "\n" + line[2:]
        yield Example(command, more)


def anchors(page: Path) -> set[str]:
    """Returns the names that a forge gives to the headings of a page."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)
        name = re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_what_the_source_says_of_a_page_is_there() -> None:
    seen = 0
    for folder in ("geventstalk", "journal", "scripts", "conf", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".pyc", ".webp", ".db") or not path.is_file() or "__pycache__" in path.parts:
                continue
            text = path.read_bytes().decode("utf-8", "replace")
            for name, anchor in re.findall(r"\b((?:docs|tests)/[\w/-]+\.md)(?:#([\w-]+))?", text):
                assert (ROOT / name).exists(), f"{path}: {name}"
                assert not anchor or anchor in anchors(ROOT / name), f"{path}: {name}#{anchor}"
                seen += 1
    assert seen > 30


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert set(re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)) | {"README.md"} == {
        page.name for page in (ROOT / "docs").glob("*.md")
    }


def test_the_reference_names_every_setting_and_command() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    flags = text.partition("## Flags and settings")[2].partition("\n## ")[0]
    commands = text.partition("### The commands")[2].partition("\n### ")[0]
    for option in KEYS:
        for name in option.flags or [option.key]:
            assert re.search(rf"`{name}\b", flags), name
    rows = set(re.findall(r"`([a-z]+)[ `]", "".join(re.findall(r"^\| (.*?) \|", commands, re.MULTILINE))))
    assert rows >= {*LIVE, "token"}, {*LIVE, "token"} - rows


def test_the_pages_name_the_format_of_this_version() -> None:
    operating, journal = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("operating", "journal"))
    assert f"segment: {FORMAT_VERSION} now" in operating
    assert f"format version, which is {FORMAT_VERSION};" in journal


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_each_command_is_typed_by_a_test_or_marked(page: Path) -> None:
    text = page.read_text()
    for block in blocks(text):
        assert block.language in SPECIMENS | {"console", "python", "sh"}, block.text
        if block.language == "sh":
            marked = MARK.fullmatch(block.mark)
            assert marked, f"a comment has to say why no test types this: {block.text}"
            if marked[1]:
                assert page.name in (ROOT / marked[1]).read_text()
        elif block.language == "console":
            assert block.text.startswith("$ ")
        else:
            assert not re.search(r"^\$ ", block.text, re.MULTILINE), block.text
    hidden = re.findall(r"\n\n {4,}(?![ -]).*", FENCE.sub("", text))
    assert not hidden, "commands stand in blocks that say what they are"


class Reader:
    """Types what a page shows, in an empty directory, on ports of its own, with the jobs of a beanstalkd at hand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "empty"
        self._log = folder / "log"
        self._ports = {shown: str(free_port()) for shown in ("11300", "11301", "8080")}
        self._server: subprocess.Popen[bytes] | None = None
        programs = folder / "bin"
        programs.mkdir()
        self._folder.mkdir()
        (self._folder / "tests").symlink_to(ROOT / "tests")
        (self._folder / "scripts").symlink_to(programs)
        for name in ("geventstalk", "run"):
            program = programs / name
            program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.join(GEVENTSTALK)} "$@"\n')
            program.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "GEVENTSTALK_PORT": self._ports["11300"],
        }

    def _here(self, text: str) -> str:
        for shown, port in self._ports.items():
            text = re.sub(rf"\b{shown}\b", port, text)
        return text.replace("/var/lib/beanstalkd", str(BINLOG))

    def types(self, example: Example) -> None:
        command, more = self._here(example.command), self._here(example.more).rstrip("\n")
        words = command.split()
        if words[0] == "nc":
            self._talk(int(words[-1]), more)
            return
        pattern = re.compile(".*".join(map(re.escape, more.split("..."))), re.DOTALL)
        if self._serves(words):
            self._start(command, pattern)
            return
        done = subprocess.run(
            ["sh", "-c", command], cwd=self._folder, env=self._environment, text=True, timeout=PATIENCE_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert pattern.fullmatch(done.stdout.rstrip("\n")), f"{command}\n{done.stdout}"

    def runs(self, program: str) -> None:
        subprocess.run([sys.executable, "-c", self._here(program)], cwd=self._folder, timeout=PATIENCE_S, check=True)

    @staticmethod
    def _serves(words: list[str]) -> bool:
        program, first = words[0], words[1] if len(words) > 1 else ""
        return program in ("geventstalk", "scripts/run") and first in ("-l", "-b") and ";" not in " ".join(words)

    def _start(self, command: str, pattern: re.Pattern[str]) -> None:
        self.end()
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                shlex.split(command), cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, executable=str(self._folder / "scripts" / "geventstalk"),
            )  # fmt: skip
        until = time.monotonic() + PATIENCE_S
        while not pattern.fullmatch(self._log.read_text().rstrip("\n")):
            assert self._server.poll() is None and time.monotonic() < until, f"{command}\n{self._log.read_text()}"
            time.sleep(0.02)

    def _talk(self, port: int, lines: str) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client, client.makefile("rb") as said:
            for line in lines.split("\n"):
                if line.startswith("> "):
                    client.sendall(line[2:].encode() + b"\r\n")
                else:
                    assert said.readline() == line.encode() + b"\r\n"

    def end(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            assert self._server.wait(PATIENCE_S) == 0
            assert "Traceback" not in self._log.read_text()
            self._server = None

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.kill()


TYPED = [page for page in PAGES if any(block.language == "console" for block in blocks(page.read_text()))]


@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED, ids=page_id)
def test_commands_do_what_the_page_says(page: Path, reader: Reader) -> None:
    found = [block for block in blocks(page.read_text()) if block.language in ("console", "python")]
    for program in ("sqlite3", "curl", "openssl"):
        if any(f"$ {program} " in block.text for block in found) and shutil.which(program) is None:
            missing(f"{program} is not installed")
    for block in found:
        if block.language == "python":
            reader.runs(block.text)
            continue
        for example in examples(block.text):
            reader.types(example)
    reader.end()
