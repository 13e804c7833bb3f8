"""The file of tokens: what is refused, in which words, and never with a token in them; and sessions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from geventstalk.config import ConfigError
from geventstalk.http.sessions import IDLE_NS, LIFE_NS, SESSIONS_MAX, Sessions
from geventstalk.http.tokens import Tokens

GOOD = "abcdefghijklmnop"


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "tokens"
    path.write_text(text, encoding="latin-1")
    path.chmod(mode)
    return str(path)


def refusal(path: str, owner: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Tokens(path, os.getuid() if owner is None else owner)
    assert caught.value.exit_code == 5 and "\n" not in str(caught.value)
    return str(caught.value)


def test_lines_comments_and_roles(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path, f"# who\n\n  a  read\t{GOOD}1\r\nb admin {GOOD}2\n"), os.getuid())
    first, second = tokens.find(GOOD + "1"), tokens.find(GOOD + "2")
    assert first and (first.name, first.role) == ("a", "read")
    assert second and (second.name, second.role) == ("b", "admin")
    for wrong in ("", GOOD, GOOD + "3", GOOD + "1 ", "\udcff", "ä" * 20):
        assert tokens.find(wrong) is None
    assert GOOD not in repr(vars(tokens))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "has no token"),
        ("# nothing", "has no token"),
        (f"a {GOOD}", "a line is not NAME read|admin TOKEN"),
        (f"a read {GOOD} x", "a line is not NAME read|admin TOKEN"),
        (f"a write {GOOD}", "the role of a is neither read nor admin"),
        ("a read abcdefghijklmno", "the token of a has 15 characters, not 16 to 512"),
        ("a read " + "x" * 513, "the token of a has 513 characters, not 16 to 512"),
        ("a read abcdefghijklmnopä", "the token of a has characters other than"),
        ("a/b read abcdefghijklmnop", "a name has up to 64"),
        (f"a read {GOOD}\nb admin {GOOD}", "the token stands above already"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, line)
    said = refusal(path)
    assert words in said and path in said
    assert not any(word in said for word in line.split() if len(word) > 14)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o666, 0o660])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    said = refusal(write(tmp_path, f"a read {GOOD}", mode))
    assert f"its mode is {mode:04o}" in said


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_its_group_may_read_it(tmp_path: Path, mode: int) -> None:
    assert Tokens(write(tmp_path, f"a read {GOOD}", mode), os.getuid()).find(GOOD)


def test_files_of_others_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, f"a read {GOOD}")
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    assert "belongs to user" in refusal(path, owner=os.getuid() or 1)
    assert "No such file" in refusal(str(tmp_path / "none"))
    before = os.listdir("/proc/self/fd")
    assert "is no file of tokens" in refusal(str(tmp_path))
    assert os.listdir("/proc/self/fd") == before
    assert "is no file of tokens" in refusal("/dev/zero")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is no file of tokens" in refusal(str(tmp_path / "pipe"))
    path = write(tmp_path, "#" * (1 << 16) + "\n")
    if os.getuid() == 0:
        os.chown(path, 0, -1)
    assert "larger than 65536 bytes" in refusal(path)


# Bug: A chmod that opened the file of tokens to all users was not noticed.
def test_a_changed_file_is_noticed_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path, f"a read {GOOD}"), os.getuid())
    token = tokens.find(GOOD)
    assert token and tokens.holds(token) and not tokens.has_changed()
    write(tmp_path, "a read")
    assert tokens.has_changed()
    with pytest.raises(ConfigError):
        tokens.read_again()
    assert not tokens.has_changed() and tokens.find(GOOD) == token
    os.unlink(tmp_path / "tokens")
    assert tokens.has_changed()
    with pytest.raises(ConfigError):
        tokens.read_again()
    assert not tokens.has_changed() and tokens.holds(token)
    write(tmp_path, f"a admin {GOOD}")
    assert tokens.has_changed()
    tokens.read_again()
    found = tokens.find(GOOD)
    assert found and found.role == "admin" and not tokens.holds(token)
    (tmp_path / "tokens").chmod(0o644)
    assert tokens.has_changed(), "its next reader is told"


def test_sessions_end_and_are_few(tmp_path: Path) -> None:
    token = Tokens(write(tmp_path, f"a read {GOOD}"), os.getuid()).find(GOOD)
    assert token
    sessions = Sessions()
    id = sessions.begin(token, 0)
    assert sessions.find("", 0) is None and sessions.find(id[:-1], 0) is None
    now_ns = 0
    while now_ns + IDLE_NS <= LIFE_NS:
        now_ns += IDLE_NS
        assert sessions.find(id, now_ns)
    assert sessions.find(id, LIFE_NS + 1) is None and len(sessions) == 0
    idle, used = sessions.begin(token, 0), sessions.begin(token, 0)
    assert sessions.find(used, IDLE_NS)
    assert sessions.find(used, IDLE_NS + 1) and sessions.find(idle, IDLE_NS + 1) is None
    for _ in range(SESSIONS_MAX - 1):
        sessions.begin(token, IDLE_NS)
    assert len(sessions) == SESSIONS_MAX and sessions.find(used, IDLE_NS + 1)
    sessions.begin(token, IDLE_NS)
    sessions.end(used)
    assert len(sessions) == SESSIONS_MAX - 1 and sessions.find(used, IDLE_NS + 1) is None
