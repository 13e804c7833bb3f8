"""Which tube needs a person first, and why: what people say when they are asked, and what must not tremble."""

from __future__ import annotations

from typing import Any

import pytest

from geventstalk.remote import sampling
from geventstalk.trouble import CALM, Trouble, trouble

HOUR = 3600.0


def of(**figures: Any) -> Trouble:
    calm: dict[str, Any] = {"ready": 0, "waits_s": 0.0, "consumers": 3, "growth": 0.0, "buried": 0, "bury_rate": 0.0}
    return trouble(**{**calm, "paused": False, **figures})


def test_who_is_asked_says_the_same() -> None:
    """From the worst to the best, each a case about which two people agree."""
    cases = [
        of(ready=158_700, waits_s=0.4 * HOUR, buried=1_480),  # a large backlog, though it is not the oldest
        of(ready=1_584, waits_s=HOUR, consumers=0, buried=369),
        of(ready=1_584, waits_s=HOUR, buried=369),  # the same with consumers
        of(ready=400, waits_s=HOUR),
        of(ready=3_000, waits_s=70, growth=50),
        of(buried=1_480),  # more than one old job, less than a backlog
        of(ready=1, waits_s=4 * HOUR),
        of(buried=1, bury_rate=1 / 60),
        of(ready=5_000, waits_s=10, growth=0.05),  # busy, and well
    ]
    scores = [case.score for case in cases]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == len(scores), scores
    assert [bool(case.why) for case in cases] == [True] * 8 + [False]


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"ready": 1_584, "waits_s": 9 * HOUR, "consumers": 0, "buried": 3}, "1,584 waiting and no consumer, 3 buried"),
        ({"ready": 1, "waits_s": 59, "consumers": 0}, ""),
        ({"ready": 1, "waits_s": 60, "consumers": 0}, "1 waiting and no consumer"),
        ({"ready": 1, "waits_s": 599}, ""),
        ({"ready": 12, "waits_s": 600}, "12 waiting for 10 min"),
        ({"ready": 12, "waits_s": 5 * HOUR}, "12 waiting for 5 h"),
        ({"ready": 12, "waits_s": 72 * HOUR, "paused": True}, "12 waiting, paused"),
        ({"ready": 12, "waits_s": 72 * HOUR}, "12 waiting for 3 d"),
        ({"ready": 9, "waits_s": 61, "growth": 12.0}, "growing by 12 a second"),
        ({"ready": 9, "waits_s": 59, "growth": 12.0}, ""),
        ({"ready": 0, "growth": 12.0}, ""),
        ({"ready": 10, "waits_s": 601, "growth": 900.0}, "growing by 900 a second, 10 waiting for 10 min"),
        ({"buried": 2, "bury_rate": 0.02}, "2 buried, becoming more"),
        ({"buried": 2, "bury_rate": 0.004}, "2 buried"),
        ({"consumers": 0}, ""),
    ],
)  # fmt: skip
def test_the_reason_is_said_in_few_words(figures: dict[str, Any], why: str) -> None:
    assert of(**figures).why == why


def test_figures_that_tremble_leave_the_order_alone() -> None:
    """Rates fade and ages grow between two looks: what is alike stays alike, and is ordered by name."""
    looks = {of(ready=1, waits_s=4 * HOUR + more, growth=0.01 * more).score for more in (0, 3, 6, 9)}
    assert len(looks) == 1
    assert of() == CALM


def test_more_of_anything_is_never_better() -> None:
    least: dict[str, Any] = {"ready": 20, "waits_s": 300.0, "growth": 0.2, "buried": 3, "bury_rate": 0.01}
    for name, value in least.items():
        scores = [of(**{**least, name: value * factor}).score for factor in (0, 1, 10, 1000)]
        assert scores == sorted(scores) and scores[0] < scores[-1], name


def shape(**others: Any) -> dict[str, Any]:
    jobs = {"ready": others.pop("ready", 0), "buried": others.pop("buried", 0)}
    return {"name": "mail", "jobs": jobs, "watching": 0, "paused_s": 0, "per_s": None, **others}


def test_top_weighs_what_the_server_tells() -> None:
    rates = {event: {"m1": value, "m15": 0.0} for event, value in (("put", 9.0), ("delete", 4.0), ("bury", 0.5))}
    told = shape(ready=700, buried=5, watching=2, ages={"ready": 1000}, rates=rates, per_s={"put": 0.0, "delete": 5.0})
    assert sampling.trouble_of(told) == of(ready=700, waits_s=1000, growth=5.0, buried=5, bury_rate=0.5)
    assert sampling.trouble_of(shape(ready=700, ages={"ready": 3})).why == ""


def test_of_beanstalkd_the_last_look_counts() -> None:
    assert sampling.trouble_of(shape(ready=700)).why == "700 waiting and no consumer"
    assert sampling.trouble_of(shape(ready=700, watching=1)) == CALM
    grows = sampling.trouble_of(shape(ready=700, per_s={"put": 20.0, "delete": 8.0}))
    assert grows.why == "700 waiting and no consumer, growing by 12 a second"
