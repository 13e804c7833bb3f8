"""The tags of a put: what a job asks for beyond its priority, delay, ttr and body.

This module must not know jobs, tubes or clients: rules.py says what each tag does.
Invariant: `text` says all of it. Parsed again, it gives the same tags.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk import backoff
from geventstalk.limits import TUBE_NAME_CHARACTERS, U32_MAX, is_tube_name

TAGS_BYTES_MAX: Final = 1024
"""The most bytes of the tags of a job, with a space between two of them."""
TAG_NAMES: Final = (b"aft", b"backoff", b"con", b"dead", b"grp", b"idp", b"note", b"tries", b"ttl")
# Why a job's time in its tube is over.
TRIED: Final = 1
EXPIRED: Final = 2
TOLD: Final = 3
REASONS: Final = ("none", "tries", "ttl", "told")
"""The name of each: that of the tag, or `told` by the worker that buried the job."""
_ORIGIN: Final = b"from"
"""The tag that the server adds to a job which it moves to another tube. No client can give it."""
_REASON: Final = b"reason"
"""The same for the text of a bury. Other characters than those of names stand as % and two hexadecimal digits."""
_OWNER: Final = b"by"
"""The tag of the user that has put the job, where the number or the bytes of the user's jobs have a limit."""
_SETTINGS: Final = b"set"
"""The same for settings that an operator makes at run time, in base64 and on a mark: they are kept as marks are."""
SETTINGS_BYTES_MAX: Final = 40_000
"""The text of tags has a length of 16 bits in a record."""
_NUMBER_DIGITS_MAX: Final = 10


@mypyc_attr(acyclic=True)
class Tags:
    """The tags of a job. An empty name and a 0 stand for a tag that is not there.

    `unique` is unique in its tube while the job lives, and for `unique_s` seconds after its deletion. The job is a
    member of `group`, and is held while `after` has members. Of the jobs with a `key`, at most `key_max` are reserved.
    After `tries` deliveries, or `ttl_s` seconds without one, the job goes to the tube `dead`; `origin` is the tube from
    which it came there. After a delivery that ended without a delete it waits as `backoff` says. `reason` is why it was
    buried, as its worker told, in UTF-8. It counts among the jobs of `owner`, with `owner_bytes`.
    `settings` are those that an operator has made at run time.
    """

    __slots__ = (
        "after",
        "backoff",
        "dead",
        "group",
        "key",
        "key_max",
        "note",
        "origin",
        "owner",
        "owner_bytes",
        "reason",
        "settings",
        "text",
        "tries",
        "ttl_s",
        "unique",
        "unique_s",
    )

    def __init__(self) -> None:
        self.text = b""
        self.unique = b""
        self.unique_s = 0
        self.group = b""
        self.after = b""
        self.key = b""
        self.key_max = 1
        self.tries = 0
        self.backoff: backoff.Backoff | None = None
        self.ttl_s = 0
        self.dead = b""
        self.note = b""
        self.origin = b""
        self.reason = b""
        self.owner = b""
        self.owner_bytes = 0
        self.settings = b""


def is_tag(word: bytes) -> bool:
    """Returns whether a word begins as a tag does that this server knows, whatever its value."""
    name, colon, _ = word.partition(b":")
    return colon != b"" and name in TAG_NAMES


def parse_put(text: bytes) -> Tags:
    """Returns the tags of a client's put: words with one space between two of them. Raises ValueError."""
    if len(text) > TAGS_BYTES_MAX:
        raise ValueError("the tags are too long")
    tags = parse(text)
    if tags.origin or tags.reason or tags.owner or tags.settings:
        raise ValueError("no client can give this tag")
    return tags


def parse(text: bytes) -> Tags:
    """Returns the tags of a text that the server keeps. Raises ValueError."""
    tags = Tags()
    tags.text = text
    seen: set[bytes] = set()
    for word in text.split(b" ") if text else []:
        name, colon, value = word.partition(b":")
        if not colon or name in seen:
            raise ValueError("a word is no tag, or a tag stands twice")
        seen.add(name)
        _set(tags, name, value)
    return tags


def moved_from(tags: Tags, tube_name: bytes) -> Tags:
    """Returns the tags of a job that the server moves out of this tube."""
    return _with(tags, _ORIGIN, tube_name)


def buried_for(tags: Tags | None, reason: bytes) -> Tags:
    """Returns the tags of a job whose worker tells why it buries it."""
    return _with(tags, _REASON, _escaped(reason))


def owned_by(tags: Tags | None, user: str, body_bytes: int) -> Tags:
    """Returns the tags of a job of this user. With 0 its bytes do not count, and equal tags of jobs share memory."""
    return _with(tags, _OWNER, _escaped(user.encode()) + (b":%d" % body_bytes if body_bytes else b""))


def kept_settings(text: bytes) -> Tags:
    """Returns the tags of a mark that keeps settings: it lasts as long as a mark can."""
    words = b"idp:settings:%d %b:%b" % (U32_MAX, _SETTINGS, b2a_base64(text, newline=False).rstrip(b"="))
    return parse(words)


def without_reason(tags: Tags) -> bytes:
    """Returns the text of tags without that of a bury."""
    return b" ".join(_others(tags, _REASON))


def _with(tags: Tags | None, name: bytes, value: bytes) -> Tags:
    words = [] if tags is None else _others(tags, name)
    return parse(b" ".join([*words, name + b":" + value]))


def _others(tags: Tags, name: bytes) -> list[bytes]:
    return [word for word in tags.text.split(b" ") if word and not word.startswith(name + b":")]


def _set(tags: Tags, name: bytes, value: bytes) -> None:
    if name == b"idp":
        tags.unique, tags.unique_s = _name_and_number(value, 0)
    elif name == b"con":
        tags.key, tags.key_max = _name_and_number(value, 1)
    elif name == b"tries":
        tags.tries = _number(value)
    elif name == b"backoff":
        tags.backoff = backoff.parse(value)
    elif name == b"ttl":
        tags.ttl_s = _number(value)
    elif name == b"grp":
        tags.group = _name(value)
    elif name == b"aft":
        tags.after = _name(value)
    elif name == b"dead":
        tags.dead = _name(value)
    elif name == b"note":
        tags.note = _name(value)
    else:
        _set_of_server(tags, name, value)


def _set_of_server(tags: Tags, name: bytes, value: bytes) -> None:
    """Sets a tag that no client can give."""
    if name == _ORIGIN:
        tags.origin = _name(value)
    elif name == _REASON:
        tags.reason = _unescaped(value)
    elif name == _OWNER:
        owner, colon, digits = value.partition(b":")
        tags.owner, tags.owner_bytes = _unescaped(owner), _number(digits) if colon else 0
    elif name == _SETTINGS:
        tags.settings = a2b_base64(value + b"=" * (-len(value) % 4))
    else:
        raise ValueError("the tag is unknown")


def _name(value: bytes) -> bytes:
    if not is_tube_name(value):
        raise ValueError("a tag's name follows the rules of tube names")
    return value


def _escaped(text: bytes) -> bytes:
    return b"".join([bytes([byte]) if byte in TUBE_NAME_CHARACTERS else b"%%%02x" % byte for byte in text])


def _unescaped(value: bytes) -> bytes:
    first, *others = value.split(b"%")
    return first + b"".join([bytes.fromhex(part[:2].decode("ascii")) + part[2:] for part in others])


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _NUMBER_DIGITS_MAX or not 0 < int(digits) <= U32_MAX:
        raise ValueError("a tag's number is from 1 to 4,294,967,295")
    return int(digits)


def _name_and_number(value: bytes, default: int) -> tuple[bytes, int]:
    name, colon, digits = value.partition(b":")
    return _name(name), _number(digits) if colon else default
