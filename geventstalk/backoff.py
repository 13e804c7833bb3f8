"""The wait of a job after a try that failed, as the tag `backoff` and the policies of tubes say.

This module must not know jobs. Invariant: the delay after a try follows from the numbers of the job and of the try, so
that a restart changes nothing.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.limits import U32_MAX

_DIGITS_MAX: Final = 10
_DELAYS_MAX: Final = 100
_PERCENT: Final = 100
_MIX: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
_64_BITS: Final = (1 << 64) - 1


@mypyc_attr(acyclic=True)
class Backoff:
    """Seconds for the first tries; each further delay is `factor` times the one before, up to `limit_s`.

    `jitter` is the part of a delay, in percent, by which it may be shorter or longer: jobs that failed together do not
    come back together. `text` says all of it.
    """

    __slots__ = ("delays", "factor", "jitter", "limit_s", "text")

    def __init__(self, text: bytes, delays: list[int], factor: int, limit_s: int, jitter: int) -> None:
        self.text = text
        self.delays = delays
        self.factor = factor
        self.limit_s = limit_s
        self.jitter = jitter

    def delay_s(self, id: int, tries: int) -> int:
        """Returns the seconds until the next try of the job with this id, after this many tries, at least 1."""
        known = min(max(tries, 1), len(self.delays))
        delay_s = self.delays[known - 1]
        more = tries - known
        while self.factor > 1 and more > 0 and delay_s < self.limit_s:
            delay_s *= self.factor
            more -= 1
        delay_s = min(delay_s, self.limit_s)
        spread = delay_s * self.jitter // _PERCENT
        if spread:
            delay_s += _mixed(id * _MIX[0] + tries) % (2 * spread + 1) - spread
        return min(max(delay_s, 1), U32_MAX)


def parse(value: bytes) -> Backoff:
    """Returns the backoff of a text: `10;60;600` or `10:2:600`, or all of it: delays, factor, limit and jitter.

    Raises ValueError.
    """
    parts = value.split(b":")
    delays = [_number(one, U32_MAX) for one in parts[0].split(b";", _DELAYS_MAX)]
    if len(parts) > 4:
        raise ValueError("a backoff has at most four parts")
    factor = _number(parts[1], U32_MAX) if len(parts) > 1 else 1
    limit_s = _number(parts[2], U32_MAX) if len(parts) > 2 else U32_MAX
    return Backoff(value, delays, factor, limit_s, _number(parts[3], _PERCENT) if len(parts) > 3 else 0)


def _number(digits: bytes, most: int) -> int:
    if not digits.isdigit() or len(digits) > _DIGITS_MAX or not 0 < int(digits) <= most:
        raise ValueError(f"a number of a backoff is from 1 to {most}")
    return int(digits)


def _mixed(number: int) -> int:
    """Returns 64 bits that look random, always the same for a number."""
    number = (number + _MIX[0]) & _64_BITS
    number = ((number ^ (number >> 30)) * _MIX[1]) & _64_BITS
    number = ((number ^ (number >> 27)) * _MIX[2]) & _64_BITS
    return number ^ (number >> 31)
