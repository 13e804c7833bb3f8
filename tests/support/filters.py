"""Filters, naively: random ones, and what they say of a job, looked up term by term."""

from __future__ import annotations

import codecs
import random
import re

from geventstalk.core.engine import Engine
from geventstalk.core.job import STATE_NAMES, Job, held_body
from geventstalk.filters import Term

TUBES = ("mail", "mail.high", "sms", "log/1", "log/2", "x")
WORDS = ("user", "42", "é", "error", "<b>", "\\n", "a b")
PATTERNS = ("user \\d+", "^user", "(err|warn)", "é+", "[^a-z]x", "4.$", "b>?$", "\\x00")
COUNTS = ("reserves", "timeouts", "releases", "buries", "kicks")


def body_of(draw: random.Random) -> bytes:
    words = [
        draw.choice((*WORDS, "user 7", "warn", "x", "b", str(draw.randrange(50)))) for _ in range(draw.randrange(6))
    ]
    data = draw.choice((" ", "", "\n")).join(words).encode()
    return data + bytes(draw.randrange(256) for _ in range(draw.choice((0, 0, 0, 5))))


def random_filter(draw: random.Random, ids: list[int]) -> str:
    terms = []
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        sign = draw.choice((":", ":", "<", "<=", ">", ">="))
        number = (
            f"{sign}{draw.randrange(1, 4)}"
            if sign != ":"
            else draw.choice((":1", ":0..2", ":2..", ":..1", ":0,2,5..9"))
        )
        low = draw.choice(ids)
        term = draw.choice(
            (
                f"tube:{draw.choice((*TUBES, 'none', '*', 'm*', '*g*', 'log/*', 'mail,sms', 'mail.*h,x', 'l*g*1'))}",
                f"state:{draw.choice(('ready', 'buried', 'delayed', 'reserved', 'ready,delayed', 'buried,reserved'))}",
                f"id:{low}..{low + draw.randrange(300)}",
                f"id:{low},{draw.choice(ids)}",
                f"id{draw.choice(('<', '<=', '>', '>='))}{low}",
                f"{draw.choice((*COUNTS, 'pri', 'holder'))}{number}",
                f"{draw.choice(('delay', 'ttr'))}{number}",
                f"size{draw.choice(('<', '>', '<=', '>='))}{draw.randrange(1, 30)}",
                f"{draw.choice(('age', 'since'))}{draw.choice(('<', '>', '<=', '>='))}{draw.randrange(1, 100)}",
                'body:"' + draw.choice(WORDS).replace("\\", "\\\\") + '"',
                f"body:/{draw.choice(PATTERNS)}/{draw.choice(('', 'i'))}",
            )
        )
        terms.append(draw.choice(("", "", "-")) + term)
    return " ".join(terms)


def holds(engine: Engine, job: Job, terms: tuple[Term, ...], now_ns: int) -> bool:
    """Returns whether the filter holds of the job."""
    body = held_body(job)[:-2]
    numbers = {
        "id": job.id,
        "pri": job.pri,
        "holder": job.holder,
        "delay": job.delay_s * 10**9,
        "ttr": job.ttr_s * 10**9,
        "size": len(body),
        "age": max(0, now_ns - job.created_ns),
        "since": max(0, now_ns - job.since_ns),
        **{count: getattr(job.tally, count, 0) for count in COUNTS},
    }
    for term in terms:
        if term.key == "tube":
            name = engine.tube_of(job).name.decode()
            found = any(re.fullmatch(re.escape(each).replace(r"\*", ".*"), name) for each in term.names)
        elif term.key == "state":
            found = STATE_NAMES[job.state] in term.names
        elif term.text is not None:
            found = term.text.encode() in body
        elif term.pattern is not None:
            found = matches(term.pattern, term.ignore_case, body)
        else:
            value = numbers[term.key]
            found = any((low is None or low <= value) and (high is None or value <= high) for low, high in term.ranges)
        if found is term.negated:
            return False
    return True


_NEARLY_UTF8 = re.compile(rb"[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")


def _as_re2(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    found = _NEARLY_UTF8.match(error.object, error.start)
    return ("\ufffd", found.end()) if found else (chr(0xDC00 + error.object[error.start]), error.start + 1)


codecs.register_error("as-re2", _as_re2)


def matches(pattern: str, ignore_case: bool, body: bytes) -> bool:
    """As RE2 sees a body: its UTF-8, in which a byte that is none matches nothing.

    To RE2, forms that are too long, surrogates and what is beyond Unicode are characters as well.
    """
    text = body.decode("utf-8", "as-re2")
    pattern = pattern.replace("[^a-z]", "[^a-z\ud800-\udfff]").replace(".", "[^\n\ud800-\udfff]").replace("$", r"\Z")
    return re.search(pattern, text, (re.IGNORECASE if ignore_case else 0)) is not None
