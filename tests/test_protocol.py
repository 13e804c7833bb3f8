"""The grammar: every case of SPEC 1.1 to 1.4 and 2.1 that is about a line, and that any bytes are harmless."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from geventstalk.wire import protocol as p
from geventstalk.wire.verb import Verb
from geventstalk.wire.verbs import ADDED, find

U32 = 2**32 - 1
U64 = 2**64 - 1


def put_in(arguments: bytes) -> object:
    size, name, numbers = p.put_in_arguments(arguments)
    if numbers is None:
        raise p.BadFormat
    return size, name, numbers


ARGUMENTS: dict[bytes, Callable[[bytes], object]] = {
    b"put ": p.put_arguments,
    b"peek ": p.id_argument,
    b"reserve-with-timeout ": p.timeout_argument,
    b"reserve-job ": p.id_argument,
    b"delete ": p.id_argument,
    b"release ": p.release_arguments,
    b"bury ": p.bury_arguments,
    b"kick ": p.kick_argument,
    b"kick-job ": p.id_argument,
    b"touch ": p.id_argument,
    b"stats-job ": p.id_argument,
    b"stats-tube ": p.name_argument,
    b"use ": p.name_argument,
    b"watch ": p.name_argument,
    b"ignore ": p.name_argument,
    b"pause-tube": p.pause_arguments,
    b"reserve-batch ": p.reserve_batch_arguments,
    b"delete-batch ": partial(p.batch_arguments, count=0),
    b"release-batch ": partial(p.batch_arguments, count=2),
    b"bury-batch ": partial(p.batch_arguments, count=1),
    b"touch-batch ": partial(p.batch_arguments, count=0),
    b"stats-group ": p.name_argument,
    b"put-in ": put_in,
    b"list-jobs ": p.list_arguments,
    b"flush-tube ": p.flush_arguments,
    b"move ": p.move_arguments,
    b"reprioritize ": p.reprioritize_arguments,
    b"reserve-mode ": p.word_argument,
}


def parse(line: bytes) -> object:
    """The verb's words with its arguments, as a session takes them; the reply instead when there is none."""
    try:
        verb, arguments = find(line)
        return (verb.words, ARGUMENTS[verb.words](arguments)) if verb.words in ARGUMENTS else verb.words
    except p.ProtocolError as error:
        return error.reply


# --- which command (SPEC 1.2)

# These own the space behind them.
VERBS = [b"put", b"peek", b"delete", b"release", b"bury", b"kick", b"kick-job", b"touch", b"use", b"watch", b"ignore"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"put 1 2 3 4", (b"put ", (1, 2, 3, 4))),
        (b"peek 7", (b"peek ", 7)),
        (b"peek-ready", b"peek-ready"),
        (b"peek-delayed", b"peek-delayed"),
        (b"peek-buried", b"peek-buried"),
        (b"reserve", b"reserve"),
        (b"reserve-with-timeout 9", (b"reserve-with-timeout ", 9)),
        (b"reserve-job 3", (b"reserve-job ", 3)),
        (b"delete 4", (b"delete ", 4)),
        (b"release 1 2 3", (b"release ", (1, 2, 3))),
        (b"bury 1 2", (b"bury ", (1, 2, b""))),
        (b"kick 5", (b"kick ", 5)),
        (b"kick-job 6", (b"kick-job ", 6)),
        (b"touch 1", (b"touch ", 1)),
        (b"stats", b"stats"),
        (b"stats-job 2", (b"stats-job ", 2)),
        (b"stats-tube t", (b"stats-tube ", b"t")),
        (b"use t", (b"use ", b"t")),
        (b"watch t", (b"watch ", b"t")),
        (b"ignore t", (b"ignore ", b"t")),
        (b"list-tubes", b"list-tubes"),
        (b"list-tube-used", b"list-tube-used"),
        (b"list-tubes-watched", b"list-tubes-watched"),
        (b"pause-tube t 8", (b"pause-tube", (b"t", 8))),
        (b"quit", b"quit"),
        (b"quitfoo", b"quit"),
        (b"quit ", b"quit"),
        (b"quit foo", b"quit"),
    ],
)
def test_commands(line: bytes, expected: object) -> None:
    assert parse(line) == expected


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_without_the_space_it_owns(verb: bytes) -> None:
    assert parse(verb) == p.R_UNKNOWN_COMMAND
    assert parse(verb + b" ") == p.R_BAD_FORMAT
    assert parse(verb + b"\t1") == p.R_UNKNOWN_COMMAND
    assert parse(verb + b"x 1") == p.R_UNKNOWN_COMMAND
    assert parse(verb.upper() + b" 1") == p.R_UNKNOWN_COMMAND


@pytest.mark.parametrize(
    "line",
    [
        *(b"reservefoo", b"reserve ", b"reserve 1", b"reserve-with-timeout", b"reserve-with-timeout ", b"reserve-job"),
        *(b"reserve-job ", b"reserve-moda fifo", b"reserve\t", b"reserve-with-timeout\t1", b"reserve-jobx 1"),
        *(
            b"statsfoo",
            b"stats foo",
            b"stats ",
            b"stats-job",
            b"stats-job ",
            b"stats-tube",
            b"stats-tube ",
            b"stats-jobx",
        ),
        *(
            b"peek-readyx",
            b"peek-ready ",
            b"peek-ready 1",
            b"peek-delayed ",
            b"peek-delayedx",
            b"peek-buried ",
            b"peek-buried1",
        ),
        *(b"list-tubesX", b"list-tubes ", b"list-tubes-watchedX", b"list-tubes-watched ", b"list-tube-usedX"),
        *(b"list-tube-used ", b"list-tubes-watche", b"pause-tube", b"pause-tube ", b"pause-tubes", b"list-tubes foo"),
    ],
)
def test_prefixes_that_fall_into_a_command_they_do_not_fit(line: bytes) -> None:
    assert parse(line) == p.R_BAD_FORMAT


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b" ", b" stats", b"  reserve", b"STATS", b"Stats", b"peek-foo", b"list-tube", b"list", b"peek\t1", b"p"),
        *(
            b"pea",
            b"qui",
            b"reserv",
            b"stat",
            b"pause",
            b"\xff",
            b"\r",
            b"sync",
            b"delete1",
            b"put\t1 2 3 4",
            b"usefoo",
        ),
    ],
)
def test_no_command_begins_like_this(line: bytes) -> None:
    assert parse(line) == p.R_UNKNOWN_COMMAND


# --- NUL (SPEC 1.1)


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"put 1 2 3 4",
            b"peek 7",
            b"peek-ready",
            b"reserve",
            b"reserve-with-timeout 9",
            b"delete 4",
            b"release 1 2 3",
        ),
        *(b"kick 5", b"stats", b"stats-tube t", b"use t", b"list-tubes", b"pause-tube t 8", b"quit", b"nonsense", b""),
    ],
)
def test_nul_anywhere_is_bad_format(line: bytes) -> None:
    for at in range(len(line) + 1):
        spoiled = line[:at] + b"\0" + line[at:]
        assert parse(spoiled) == p.R_BAD_FORMAT, spoiled
    if line.startswith(b"put "):
        assert p.put_size_with_garbage(line[4:] + b"\0") == -1
        assert p.put_size_with_garbage(line[4:] + b" \0") == -1


# --- numbers (SPEC 1.3)

# Each command with one number missing, and how much that number may be.
NUMBERS = [
    (b"peek %b", U64),
    (b"reserve-job %b", U64),
    (b"delete %b", U64),
    (b"release %b 1 2", U64),
    (b"release 1 %b 2", U32),
    (b"release 1 2 %b", U32),
    (b"bury %b 1", U64),
    (b"bury 1 %b", U32),
    (b"kick-job %b", U64),
    (b"touch %b", U64),
    (b"stats-job %b", U64),
    (b"put %b 1 1 1", U32),
    (b"put 1 %b 1 1", U32),
    (b"put 1 1 %b 1", U32),
    (b"put 1 1 1 %b", U32),
    (b"pause-tube t %b", U32),
    (b"reserve-with-timeout %b", 2**31 - 1),
]


@pytest.mark.parametrize(("template", "limit"), NUMBERS)
def test_numbers(template: bytes, limit: int) -> None:
    for good in (b"0", b"1", b"007", b"  5", b"%d" % limit, b"0" * 30 + b"%d" % limit):
        assert not isinstance(parse(template % good), bytes), good
    for bad in (b"%d" % (limit + 1), b"9" * 40, b"", b"+1", b"-1", b"\t1", b"a", b"x1", b"\xb2", b"\xd9\xa1"):
        assert parse(template % bad) == p.R_BAD_FORMAT, bad
    assert parse(template % b"%d" % limit) == parse(template % b"00%d" % limit)


@pytest.mark.parametrize("template", [template for template, _ in NUMBERS])
def test_nothing_may_stand_behind_the_last_number(template: bytes) -> None:
    line = template % b"1"
    lenient = line.startswith(b"reserve-with-timeout")
    for behind in (b" ", b"x", b" x", b" 1", b"\t", b"-", b"\r"):
        if line.startswith(b"bury") and behind == b" x":
            assert parse(line + behind) == (b"bury ", (1, 1, b"x"))
            continue
        assert (parse(line + behind) == parse(line)) if lenient else (parse(line + behind) == p.R_BAD_FORMAT)


def test_any_number_of_spaces_between_numbers() -> None:
    assert parse(b"put   1  2   3    4") == parse(b"put 1 2 3 4")
    assert parse(b"release  1  2  3") == parse(b"release 1 2 3")
    assert parse(b"bury 1    2") == parse(b"bury 1 2")
    for line in (
        b"put 1\t2 3 4",
        b"put 1,2 3 4",
        b"release 1 2\t3",
        b"bury 1\t2",
        b"put 1 2 3",
        b"bury 1",
        b"release 1 2",
    ):
        assert parse(line) == p.R_BAD_FORMAT


@pytest.mark.parametrize(
    "text", ["x", "5x", "a 5", "no\u00a0: \u2019", "\U0001f468\u200d\U0001f469\ufe0f", "\ue000", "\u0378", "\U0010ffff"]
)
def test_a_text_of_a_bury(text: str) -> None:
    """Also characters that Python does not take for printable: spaces that join words, and those of emoji."""
    assert parse(b"bury 1 2 " + text.encode()) == (b"bury ", (1, 2, text.encode()))


@pytest.mark.parametrize(
    "text",
    [b"5", b"a\tb", b"a\x00", b"\x7f", b"\xff", *[f"a{c}b".encode() for c in "\x85\u2028\u202e\u2066\ufeff\uffff"]],
)
def test_what_is_no_text_of_a_bury(text: bytes) -> None:
    assert parse(b"bury 1 2 " + text) == p.R_BAD_FORMAT


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"0", 0), (b"0foo", 0), (b"0 x y", 0), (b"5 ", 5), (b"  7", 7), (b"2147483647", 2**31 - 1), (b"3.5", 3)],
)
def test_timeouts(text: bytes, seconds: int) -> None:
    assert parse(b"reserve-with-timeout " + text) == (b"reserve-with-timeout ", seconds)


@pytest.mark.parametrize("text", [b"x", b"-1", b"+0", b"2147483648", b"4294967296", b" ", b"\t1", b"foo0"])
def test_what_is_no_timeout(text: bytes) -> None:
    assert parse(b"reserve-with-timeout " + text) == p.R_BAD_FORMAT


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        *((b"0", 0), (b"5", 5), (b"5x", 5), (b"1 2 3", 1), (b" \t 7", 7), (b"\v\f\r8", 8), (b"+9", 9), (b"-0", 0)),
        *((b"-1", U32), (b"-2", U32 - 1), (b"4294967295", U32), (b"4294967296", 0), (b"4294967297", 1)),
        *((b"18446744073709551615", U32), (b"-18446744073709551615", 1), (b"0x10", 0), (b"007", 7), (b"3 ", 3)),
    ],
)
def test_kick_is_read_like_strtoul_and_cut_to_32_bits(text: bytes, bound: int) -> None:
    assert parse(b"kick " + text) == (b"kick ", bound)


@pytest.mark.parametrize(
    "text", [b"", b" ", b"x", b"+", b"-", b"+-1", b"--1", b"- 1", b"18446744073709551616", b"9" * 99]
)
def test_what_is_no_bound(text: bytes) -> None:
    assert parse(b"kick " + text) == p.R_BAD_FORMAT


# --- tube names (SPEC 1.4)

ALLOWED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-+/;.$_()"


@pytest.mark.parametrize("verb", [b"use", b"watch", b"ignore", b"stats-tube"])
def test_tube_names(verb: bytes) -> None:
    for byte in range(256):
        name = b"a%c" % byte
        known = parse(verb + b" " + name) != p.R_BAD_FORMAT
        assert known == (byte in ALLOWED), name
        first = parse(b"%b %cb" % (verb, byte)) != p.R_BAD_FORMAT
        assert first == (byte in ALLOWED and byte != ord("-")), byte
    longest = b"x" * 200
    assert parse(b"%b %b" % (verb, longest)) == (verb + b" ", longest)
    for name in (b"", b"x" * 201, b" foo", b"foo ", b"foo bar", b"a,b", b"a:b", b"t\xc3\xa9", b"-", b"a\t"):
        assert parse(b"%b %b" % (verb, name)) == p.R_BAD_FORMAT, name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"pause-tube default 0", (b"default", 0)),
        (b"pause-tubedefault 0", (b"default", 0)),
        (b"pause-tube   default   0", (b"default", 0)),
        (b"pause-tube " + b"x" * 200 + b" 4294967295", (b"x" * 200, U32)),
        (b"pause-tube-a 5", (b"-a", 5)),  # proves not to be a tube name later, after it was counted
        (b"pause-tube -a 5", (b"-a", 5)),
        (b"pause-tube " + b"x" * 201 + b" 1", (b"x" * 201, 1)),
    ],
)
def test_pause_arguments(line: bytes, expected: tuple[bytes, int]) -> None:
    assert parse(line) == (b"pause-tube", expected)


@pytest.mark.parametrize(
    "rest",
    [b" t", b" t ", b" t x", b" t 1 ", b" t 1x", b" t 1 2", b" t\t1", b" a,b 1", b" 5", b" t -1", b"t1", b" \xff 1"],
)
def test_what_is_no_pause(rest: bytes) -> None:
    assert parse(b"pause-tube" + rest) == p.R_BAD_FORMAT


def test_the_longest_line_is_a_pause_of_the_longest_name() -> None:
    assert len(b"pause-tube " + b"x" * 200 + b" 4294967295" + p.CRLF) == p.LINE_BYTES_MAX == 224


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        (b"a", True),
        (b"(x)", True),
        (b"x" * 200, True),
        (b"x" * 201, False),
        (b"", False),
        (b"-a", False),
        (b"a b", False),
    ],
)
def test_is_tube_name(name: bytes, fits: bool) -> None:
    assert p.is_tube_name(name) == fits


# --- a put with something behind its size (SPEC 2.1)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        (b"put 1 2 3 4 ", 4),
        (b"put 1 2 3 4x", 4),
        (b"put 1 2 3 4 5", 4),
        (b"put 1 2 3 70000 garbage", 70000),
        (b"put  1  2  3  4-", 4),
        (b"put 1 2 3 4294967295x", U32),
        (b"put 1 2 3 4294967296x", -1),
        (b"put 1 2 3 x", -1),
        (b"put 1 2 3 ", -1),
        (b"put 1 2 x 4 ", -1),
        (b"put 1 4294967296 3 4 ", -1),
        (b"put -1 2 3 4 ", -1),
        (b"put ", -1),
        (b"put 1\t2 3 4 5", -1),
    ],
)
def test_put_size_with_garbage(line: bytes, size: int) -> None:
    assert parse(line) == p.R_BAD_FORMAT
    assert p.put_size_with_garbage(line[4:]) == size


@pytest.mark.parametrize("verb", ADDED, ids=lambda verb: verb.words.decode().strip())
@pytest.mark.parametrize("line", [b"%b", b"%bx", b"%bx 1", b"%b\t1", b" %b 1", b"x%b 1"])
def test_only_the_exact_words_of_a_verb_that_was_added_count(verb: Verb, line: bytes) -> None:
    """Everything else that begins like it is answered as before there was this verb."""
    words = verb.words.strip()
    if line == b"%b" and not verb.words.endswith(b" "):
        assert parse(words) == words
    else:
        upstream = (
            p.R_BAD_FORMAT
            if words.startswith((b"reserve", b"stats")) and line.startswith(b"%b")
            else p.R_UNKNOWN_COMMAND
        )
        assert parse(line % words) == upstream


# --- any bytes

OTHERS = b"peek-ready reserve reserve-with-timeout reserve-job stats stats-job stats-tube list-tubes pause-tube quit"
words = st.sampled_from([*VERBS, *OTHERS.split(), *[verb.words.strip() for verb in ADDED]])
pieces = st.sampled_from(
    (b" ", b"  ", b"\t", b"\0", b"0", b"7", b"4294967296", b"-", b"+", b"t", b"x" * 201, b"\xff", b"\r")
)
lines = st.binary(max_size=224) | st.tuples(words, st.lists(pieces, max_size=9)).map(
    lambda drawn: drawn[0] + b"".join(drawn[1])
)


@settings(deadline=None, database=None, print_blob=True, max_examples=400)
@given(lines)
@example(b"kick -")
@example(b"put 1 2 3 4 \xb2")
@example(b"reserve-with-timeout " + "٣".encode())
def test_any_bytes_are_a_command_or_a_protocol_error(line: bytes) -> None:
    verb = reply = None
    try:
        verb, arguments = find(line)
        if verb.words in ARGUMENTS:
            ARGUMENTS[verb.words](arguments)
    except p.ProtocolError as error:
        reply = error.reply
    assert reply in (None, p.R_BAD_FORMAT, p.R_UNKNOWN_COMMAND)
    if b"\0" in line:
        assert reply == p.R_BAD_FORMAT
    if reply == p.R_UNKNOWN_COMMAND:
        assert verb is None, "who knows the command does not call it unknown"
    assert -1 <= p.put_size_with_garbage(line) <= U32
    for parser in ARGUMENTS.values():  # none of them relies on being called for its own command
        with suppress(p.ProtocolError):
            parser(line)


@settings(deadline=None, database=None, print_blob=True)
@given(st.integers(0, U64), st.integers(0, U32), st.integers(0, U32), st.integers(0, U32))
def test_numbers_come_through(id: int, pri: int, delay: int, size: int) -> None:
    assert p.id_argument(b"%d" % id) == id
    assert p.bury_arguments(b"%d %d" % (id, pri)) == (id, pri, b"")
    assert p.release_arguments(b"%d %d %d" % (id, pri, delay)) == (id, pri, delay)
    for _ in range(2):  # also when it knows them already
        assert p.put_arguments(b"%d %d %d %d" % (pri, delay, pri, size)) == (pri, delay, pri, size)
    assert p.kick_argument(b"%d" % id) == id % 2**32


# --- replies


def test_replies() -> None:
    assert p.inserted(U64) == b"INSERTED 18446744073709551615\r\n"
    assert p.reserved(7, b"a\r\nb\r\n") == b"RESERVED 7 4\r\na\r\nb\r\n"
    assert p.reserved(7, b"\r\n") == b"RESERVED 7 0\r\n\r\n"
    assert p.found(8, b"x\r\n") == b"FOUND 8 1\r\nx\r\n"
    assert p.using(b"t") == b"USING t\r\n"
    assert p.watching(3) == b"WATCHING 3\r\n"
    assert p.kicked(0) == b"KICKED 0\r\n"


def test_lists_and_maps() -> None:
    assert p.ok(p.yaml_list([b"default"])) == b"OK 14\r\n---\n- default\n\r\n"
    assert p.yaml_list([]) == b"---\n"
    text = p.yaml_map([("name", p.quoted(b"a$b")), ("pri", 5), ("state", "ready"), ("uptime", -1)])
    assert text == b'---\nname: "a$b"\npri: 5\nstate: ready\nuptime: -1\n'
    assert p.ok(text) == b"OK %d\r\n%b\r\n" % (len(text), text)


def test_every_error_reply_is_a_line() -> None:
    for error in (p.BadFormat, p.UnknownCommand):
        assert issubclass(error, p.ProtocolError)
        assert error.reply.endswith(p.CRLF) and error.reply.count(p.CRLF) == 1
