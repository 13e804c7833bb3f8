"""The grammar of the beanstalk protocol: a command's arguments from their bytes, results to reply bytes.

This module must not know the engine, sockets or time. Reference: upstream's doc/protocol.txt and the behaviour of its
server, version 1.13.
Invariant: whatever the bytes, a function here returns or raises ProtocolError, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Final

from mypy_extensions import i64

from geventstalk._build import BUILD
from geventstalk.limits import TUBE_NAME_BYTES_MAX as TUBE_NAME_BYTES_MAX
from geventstalk.limits import TUBE_NAME_CHARACTERS, U32_BITS, U32_MAX, U64_BITS
from geventstalk.limits import is_tube_name as is_tube_name
from geventstalk.tags import TAGS_BYTES_MAX, Tags, is_tag, parse_put

LINE_BYTES_MAX: Final = 224
"""The longest command line with its CRLF: `pause-tube`, a name of 200 characters and a number of ten digits."""
TAGGED_LINE_BYTES_MAX: Final = LINE_BYTES_MAX + 1 + TAGS_BYTES_MAX
"""The same for a put with tags."""
PUT_IN_LINE_BYTES_MAX: Final = TAGGED_LINE_BYTES_MAX + TUBE_NAME_BYTES_MAX + 1
"""The same for `put-in`, also with tags."""
BATCH_LINE_BYTES_MAX: Final = 1 << 14
"""The same for a verb that names up to BATCH_MAX jobs."""
ADDED_LINE_BYTES_MAX: Final = 512
"""The same for the other verbs that upstream does not have."""
WEIGHT_MAX: Final = 1000
"""The largest weight of a watched tube."""
BATCH_MAX: Final = 1000
"""The most jobs that one command names or takes."""
CRLF: Final = b"\r\n"
_CR: Final = 13
_LF: Final = 10
_SPACE: Final = 32
_ZERO: Final = 48
YAML_HEAD: Final = b"---\n"
_MAP_LINE: Final = "%s: %s\n"
_NO_TEXT: Final = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
"""Words that YAML 1.1 does not read as text."""

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
"""Characters that no text of a bury has: they would break a line, or the output of a program that shows the text."""

_NATIVE: Final = BUILD == "compiled"
"""Compiled, a loop over some bytes is much faster than a method of `bytes`; interpreted, much slower."""
_SHORT_DIGITS: Final = 18
"""Digits that fit into 63 bits."""
_U32_DIGITS: Final = 9
"""Digits that fit into 32 bits."""
_TIMEOUT_BITS: Final = 31
_TIMEOUT_MAX: Final = 2147483647
"""The largest timeout of reserve-with-timeout: upstream keeps it in a C int."""

_SEEN_PUTS: Final[dict[bytes, tuple[int, int, int, int]]] = {}
"""Arguments of earlier puts. Most producers repeat theirs, which saves a third of an interpreted put."""
_SEEN_PUTS_MAX: Final = 1024

_SPACES_OF_KICK: Final = b" \t\n\v\f\r"  # what C's strtoul skips

# Replies that never change.
R_BAD_FORMAT: Final = b"BAD_FORMAT\r\n"
R_UNKNOWN_COMMAND: Final = b"UNKNOWN_COMMAND\r\n"
R_EXPECTED_CRLF: Final = b"EXPECTED_CRLF\r\n"
R_JOB_TOO_BIG: Final = b"JOB_TOO_BIG\r\n"
R_DRAINING: Final = b"DRAINING\r\n"
R_OUT_OF_MEMORY: Final = b"OUT_OF_MEMORY\r\n"
R_INTERNAL_ERROR: Final = b"INTERNAL_ERROR\r\n"
R_NOT_FOUND: Final = b"NOT_FOUND\r\n"
R_NOT_IGNORED: Final = b"NOT_IGNORED\r\n"
R_DELETED: Final = b"DELETED\r\n"
R_RELEASED: Final = b"RELEASED\r\n"
R_BURIED: Final = b"BURIED\r\n"
R_KICKED: Final = b"KICKED\r\n"
R_TOUCHED: Final = b"TOUCHED\r\n"
R_PAUSED: Final = b"PAUSED\r\n"
R_TIMED_OUT: Final = b"TIMED_OUT\r\n"
R_DEADLINE_SOON: Final = b"DEADLINE_SOON\r\n"
R_NOT_DRAINING: Final = b"NOT_DRAINING\r\n"
R_MOVED: Final = b"MOVED\r\n"
R_CHANGED: Final = b"CHANGED\r\n"
R_FORBIDDEN: Final = b"FORBIDDEN\r\n"


class ProtocolError(Exception):
    """The client's input is no command. `reply` says so; the connection lives on."""

    reply: ClassVar[bytes] = R_INTERNAL_ERROR  # as an attribute of the instance, mypyc would lose it for an exception


class BadFormat(ProtocolError):
    """The command is known, its arguments are wrong, or the line is too long."""

    reply: ClassVar[bytes] = R_BAD_FORMAT


class UnknownCommand(ProtocolError):
    """No command begins like this line."""

    reply: ClassVar[bytes] = R_UNKNOWN_COMMAND


def line_end(data: bytes, at: i64) -> i64:
    """Returns where the first CRLF from `at` on begins, or -1."""
    if _NATIVE:
        last: i64 = min(len(data) - 1, at + LINE_BYTES_MAX)
        # Every other byte is enough: one of CRLF is among them. LINE_BYTES_MAX is even, so no CR is passed at the end.
        while at < last:
            if data[at + 1] <= _CR:
                if data[at] == _CR and data[at + 1] == _LF:
                    return at
                if data[at + 1] == _CR and at + 1 < last and data[at + 2] == _LF:
                    return at + 1
            at += 2
    return data.find(CRLF, at)


def _digits(word: bytes) -> i64:
    """Returns the value of some digits; -1 for none, too many, or other characters."""
    size: i64 = len(word)
    if size > _SHORT_DIGITS or not size:
        return -1
    value: i64 = 0
    at: i64 = 0
    while at < size:
        digit: i64 = word[at] - _ZERO
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
        at += 1
    return value


def _number(word: bytes, bits: int) -> int:
    """Reads an unsigned number of this many bits, behind any number of spaces."""
    value = int(_digits(word)) if _NATIVE else -1
    if value < 0:
        if not word.isdigit():
            word = word.lstrip(b" ")
            if not word.isdigit():
                raise BadFormat
        value = int(word)
    if value >> bits:  # to compare with 2**64, which is an object of its own, would be dearer
        raise BadFormat
    return value


def _words(arguments: bytes, count: int) -> list[bytes]:
    """Splits arguments. Any number of spaces may stand between them, none behind the last."""
    words = arguments.split(b" ")
    if len(words) != count:
        words = [word for word in words if word]
        if len(words) != count or arguments.endswith(b" "):
            raise BadFormat
    return words


def id_argument(arguments: bytes) -> int:
    """`<verb> <id>`: an unsigned 64-bit number."""
    if _NATIVE:
        id = int(_digits(arguments))
        if id >= 0:
            return id
    elif len(arguments) <= _SHORT_DIGITS and arguments.isdigit():
        return int(arguments)
    return _number(arguments, U64_BITS)


def bury_arguments(arguments: bytes) -> tuple[int, int, bytes]:
    """`bury <id> <pri> [<text>]`."""
    try:
        words = _words(arguments, 2)
    except BadFormat:
        return _told_bury_arguments(arguments)
    return _number(words[0], U64_BITS), _number(words[1], U32_BITS), b""


def _told_bury_arguments(arguments: bytes) -> tuple[int, int, bytes]:
    """The same with a text. A number is no text: it is answered as beanstalkd answers it."""
    words = arguments.split(None, 2)
    if len(words) < 3:
        raise BadFormat
    text = words[2]
    words = _words(arguments.removesuffix(text).rstrip(b" "), 2)
    if text.isdigit() or not _is_text(text):
        raise BadFormat
    return _number(words[0], U64_BITS), _number(words[1], U32_BITS), text


def _is_text(text: bytes) -> bool:
    """Returns whether this is UTF-8 without control characters, and without others that break or turn a line."""
    try:
        return _CONTROL.search(text.decode("utf-8")) is None
    except UnicodeDecodeError:
        return False


def release_arguments(arguments: bytes) -> tuple[int, int, int]:
    """`release <id> <pri> <delay>`."""
    words = _words(arguments, 3)
    return _number(words[0], U64_BITS), _number(words[1], U32_BITS), _number(words[2], U32_BITS)


def batch_arguments(arguments: bytes, count: int) -> list[int]:
    """Reads `<verb> <number> ... <id> ...`: this many 32-bit numbers, then 1 to 1,000 ids. Returns all of them."""
    words = arguments.split(b" ")
    if b"" in words:
        words = [word for word in words if word]
        if arguments.endswith(b" "):
            raise BadFormat
    if not count < len(words) <= count + BATCH_MAX or max(map(len, words)) > LINE_BYTES_MAX:
        raise BadFormat  # Python refuses to read thousands of digits
    return [_number(word, U32_BITS if at < count else U64_BITS) for at, word in enumerate(words)]


def reserve_batch_arguments(arguments: bytes) -> tuple[int, int]:
    """`reserve-batch <count> [<seconds>]`. Returns the count, 1 to 1,000, and the seconds, or 0."""
    count, space, seconds = arguments.lstrip(b" ").partition(b" ")
    number = _number(count, U32_BITS)
    if not 0 < number <= BATCH_MAX:
        raise BadFormat
    return number, _number(seconds, _TIMEOUT_BITS) if space else 0


def put_arguments(arguments: bytes) -> tuple[int, int, int, int]:
    """`put <pri> <delay> <ttr> <bytes>`. Raises BadFormat where the body must not be skipped either."""
    if _NATIVE:
        pri, delay_s, ttr_s, size = _four_numbers(arguments)
        if pri >= 0:
            return int(pri), int(delay_s), int(ttr_s), int(size)
    else:
        seen = _SEEN_PUTS.get(arguments)
        if seen is not None:
            return seen
    words = _words(arguments, 4)
    numbers = (
        _number(words[0], U32_BITS),
        _number(words[1], U32_BITS),
        _number(words[2], U32_BITS),
        _number(words[3], U32_BITS),
    )
    if len(_SEEN_PUTS) >= _SEEN_PUTS_MAX:
        _SEEN_PUTS.clear()
    _SEEN_PUTS[arguments] = numbers
    return numbers


def _four_numbers(words: bytes) -> tuple[i64, i64, i64, i64]:
    """Reads four numbers of nine digits at most, with one space between them. Anything else is four times -1."""
    first: i64 = 0
    second: i64 = 0
    third: i64 = 0
    value: i64 = 0
    spaces: i64 = 0
    begin: i64 = 0
    at: i64 = 0
    last: i64 = len(words)
    while at < last:
        digit: i64 = words[at] - _ZERO
        if digit >= 0 and digit <= 9:
            value = value * 10 + digit
        elif digit == _SPACE - _ZERO and at > begin and at - begin <= _U32_DIGITS:
            first = second
            second = third
            third = value
            value = 0
            spaces += 1
            begin = at + 1
        else:
            return -1, -1, -1, -1
        at += 1
    if spaces == 3 and at > begin and at - begin <= _U32_DIGITS:
        return first, second, third, value
    return -1, -1, -1, -1


def put_size_with_garbage(arguments: bytes) -> int:
    """Returns the size of a put with more words behind it; -1 when it is wrong before that.

    Upstream counts such a put, and for a size over the limit it even skips the body.
    """
    words = [word for word in arguments.split(b" ") if word]
    if len(words) < 4 or 0 in arguments:
        return -1
    digits = words[3][: len(words[3]) - len(words[3].lstrip(b"0123456789"))]
    try:
        for word in words[:3]:
            _number(word, U32_BITS)
        return _number(digits, U32_BITS)
    except BadFormat:
        return -1


def put_tags(arguments: bytes) -> tuple[int, tuple[int, int, int, Tags] | None]:
    """`put <pri> <delay> <ttr> <bytes> <tag> ...`: the size of the body, and all else, None where that is wrong.

    The size is -1 where the fifth word is no tag, or the fourth no size: then upstream's rules hold.
    """
    words = arguments.split(b" ")
    if b"" in words:
        words = [word for word in words if word]
    if len(words) < 5 or not is_tag(words[4]) or not words[3].isdigit() or len(words[3]) > LINE_BYTES_MAX:
        return -1, None
    size = int(words[3])
    if size > U32_MAX:
        return -1, None
    try:
        pri, delay_s, ttr_s = [_number(word, U32_BITS) for word in words[:3]]
        if arguments.endswith(b" "):
            raise BadFormat
        return size, (pri, delay_s, ttr_s, parse_put(b" ".join(words[4:])))
    except (BadFormat, ValueError):
        return size, None


def put_in_arguments(arguments: bytes) -> tuple[int, bytes, tuple[int, int, int, Tags | None] | None]:
    """`put-in <tube> <pri> <delay> <ttr> <bytes> [<tag> ...]`: the size of the body, the tube, and all else.

    All else is None where it is wrong, or the tube's name. Raises BadFormat where the size is not known.
    """
    words = [word for word in arguments.split(b" ") if word]
    if len(words) < 5 or not words[4].isdigit() or len(words[4]) > _U32_DIGITS + 1 or int(words[4]) > U32_MAX:
        raise BadFormat
    size, name = int(words[4]), words[0]
    try:
        pri, delay_s, ttr_s = [_number(word, U32_BITS) for word in words[1:4]]
        tags = parse_put(b" ".join(words[5:])) if len(words) > 5 else None
    except (BadFormat, ValueError):
        return size, name, None
    right = is_tube_name(name) and not arguments.endswith(b" ")
    return size, name, (pri, delay_s, ttr_s, tags) if right else None


def reprioritize_arguments(arguments: bytes) -> tuple[int, int, int]:
    """`reprioritize <id> <pri> [<delay>]`: the delay is -1 when there is none."""
    words = [word for word in arguments.split(b" ") if word]
    if len(words) not in (2, 3) or arguments.endswith(b" "):
        raise BadFormat
    delay_s = _number(words[2], U32_BITS) if len(words) == 3 else -1
    return _number(words[0], U64_BITS), _number(words[1], U32_BITS), delay_s


def move_arguments(arguments: bytes) -> tuple[int, bytes]:
    """`move <id> <tube>`."""
    words = _words(arguments, 2)
    return _number(words[0], U64_BITS), name_argument(words[1])


def flush_arguments(arguments: bytes) -> tuple[bytes, bytes]:
    """`flush-tube <tube> [<state>]`: the state is empty when there is none."""
    words = [word for word in arguments.split(b" ") if word]
    if len(words) not in (1, 2) or arguments.endswith(b" "):
        raise BadFormat
    return name_argument(words[0]), word_argument(words[1]) if len(words) == 2 else b""


def list_arguments(arguments: bytes) -> tuple[bytes, bytes, int, int]:
    """`list-jobs <tube> <state> <count> [<after id>]`: the id is 0 when there is none."""
    words = [word for word in arguments.split(b" ") if word]
    if len(words) not in (3, 4) or arguments.endswith(b" "):
        raise BadFormat
    count = _number(words[2], U32_BITS)
    if not 0 < count <= BATCH_MAX:
        raise BadFormat
    after = _number(words[3], U64_BITS) if len(words) == 4 else 0
    return name_argument(words[0]), word_argument(words[1]), count, after


def watch_arguments(arguments: bytes) -> tuple[bytes, int]:
    """`watch <tube> <weight>`: a weight from 1 to 1,000."""
    words = _words(arguments, 2)
    weight = _number(words[1], U32_BITS)
    if not 0 < weight <= WEIGHT_MAX:
        raise BadFormat
    return name_argument(words[0]), weight


def timeout_argument(arguments: bytes) -> int:
    """`reserve-with-timeout <seconds>`: whatever follows the digits is ignored, as upstream does, but no NUL."""
    if _NATIVE:
        seconds = int(_digits(arguments))
        if 0 <= seconds <= _TIMEOUT_MAX:
            return seconds
    if not arguments.isdigit():
        if 0 in arguments:
            raise BadFormat
        text = arguments.lstrip(b" ")
        arguments = text[: len(text) - len(text.lstrip(b"0123456789"))]
    return _number(arguments, _TIMEOUT_BITS)


def kick_argument(arguments: bytes) -> int:
    """`kick <bound>`, read like C's strtoul and cut to 32 bits, as upstream does: -1 is 4,294,967,295. No NUL in it."""
    if 0 in arguments:
        raise BadFormat
    text = arguments.lstrip(_SPACES_OF_KICK)
    negative = text.startswith(b"-")
    if text.startswith((b"-", b"+")):
        text = text[1:]
    digits = text[: len(text) - len(text.lstrip(b"0123456789"))]
    value = _number(digits, U64_BITS)
    return (-value if negative else value) & U32_MAX


def name_argument(arguments: bytes) -> bytes:
    """`<verb> <tube>`: exactly one space, then a tube name."""
    if not is_tube_name(arguments):
        raise BadFormat
    return arguments


def word_argument(word: bytes) -> bytes:
    """One of some words: letters, with hyphens between them."""
    if not word.replace(b"-", b"").isalpha():
        raise BadFormat
    return word


def pause_arguments(arguments: bytes) -> tuple[bytes, int]:
    """`pause-tube <tube> <delay>`: no space is needed before the name, which may still prove not to be a tube name."""
    text = arguments.lstrip(b" ")
    rest = text.lstrip(TUBE_NAME_CHARACTERS)
    if not rest.startswith(b" "):
        raise BadFormat
    return text[: len(text) - len(rest)], _number(rest, U32_BITS)


def inserted(id: int) -> bytes:
    return b"INSERTED %d\r\n" % id


def duplicate(id: int, state: str, pri: int) -> bytes:
    """The reply to a put whose unique key a job has already. `pri` is that job's priority if it was raised, or -1."""
    reply = b"INSERTED %d %b" % (id, state.upper().encode())
    return reply + (b"\r\n" if pri < 0 else b" %d\r\n" % pri)


def reserved(id: int, body: bytes) -> bytes:
    """`body` includes its CRLF, which the announced size does not count."""
    return b"RESERVED %d %d\r\n%b" % (id, len(body) - 2, body)


def found(id: int, body: bytes) -> bytes:
    """`body` includes its CRLF, which the announced size does not count."""
    return b"FOUND %d %d\r\n%b" % (id, len(body) - 2, body)


def reserved_line(id: int, body: bytes) -> bytes:
    """Returns the part of reserved() before the body."""
    return b"RESERVED %d %d\r\n" % (id, len(body) - 2)


def found_line(id: int, body: bytes) -> bytes:
    """Returns the part of found() before the body."""
    return b"FOUND %d %d\r\n" % (id, len(body) - 2)


def flushed(count: int) -> bytes:
    return b"FLUSHED %d\r\n" % count


def reserved_batch(count: int) -> bytes:
    """Returns the line behind which this many replies of reserved() follow."""
    return b"RESERVED_BATCH %d\r\n" % count


def batch_done(done: bytes, count: int, not_found: int) -> bytes:
    return b"%b_BATCH %d %d\r\n" % (done, count, not_found)


def using(name: bytes) -> bytes:
    return b"USING %b\r\n" % name


def watching(count: int) -> bytes:
    return b"WATCHING %d\r\n" % count


def kicked(count: int) -> bytes:
    return b"KICKED %d\r\n" % count


def ok(text: bytes) -> bytes:
    """`text` is YAML and ends with a newline; the announced size counts that."""
    return b"OK %d\r\n%b\r\n" % (len(text), text)


def ok_line(size: int) -> bytes:
    """Returns the line before a text of this size; CRLF stands behind the text."""
    return b"OK %d\r\n" % size


def yaml_list(names: Iterable[bytes]) -> bytes:
    """Returns names as a YAML list, unquoted as upstream."""
    return YAML_HEAD + yaml_names(names)


def yaml_names(names: Iterable[bytes]) -> bytes:
    """Returns a part of a YAML list."""
    return b"".join([b"- %b\n" % name for name in names])


def yaml_names_bytes(names: list[bytes]) -> int:
    """Returns the size of yaml_names()."""
    return sum(map(len, names)) + len(b"- \n") * len(names)


def yaml_map(items: Iterable[tuple[str, object]]) -> bytes:
    """Returns keys and values as a YAML map. Text stays as it is: see quoted()."""
    return YAML_HEAD + "".join(map(_MAP_LINE.__mod__, items)).encode("latin-1")


def plain(name: bytes) -> str:
    """Returns a name as a YAML map has it: without quotes, as tuber has names, unless it would not be text then."""
    text = name.decode("latin-1")
    return text if text[:1].isalpha() and text.lower() not in _NO_TEXT else f'"{text}"'


def spoken(text: bytes) -> str:
    """Returns any text as a YAML map has it, in double quotes."""
    escaped = text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return f'"{escaped.decode("latin-1")}"'


def quoted(value: object) -> object:
    """Returns a value as a YAML map has it: bytes are quoted, as upstream quotes all but numbers."""
    return f'"{value.decode("latin-1")}"' if isinstance(value, bytes) else value
