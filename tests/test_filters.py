"""The grammar of filters: examples that the console reads, too, and what holds for any text."""

from __future__ import annotations

import ast
import json
import random
import traceback
from pathlib import Path
from typing import Any

from geventstalk import filters
from geventstalk.filters import FILTER_CHARS_MAX, KEYS, STATES, FilterError, parse

EXAMPLES = Path(__file__).parent / "data" / "filters.json"
CASES: list[dict[str, Any]] = json.loads(EXAMPLES.read_text(encoding="ascii"))["cases"]


def outcome(text: str) -> dict[str, Any]:
    try:
        return {"filter": text, "terms": [term.as_json() for term in parse(text)]}
    except FilterError as error:
        return {"filter": text, "error": str(error), "at": error.at}


def test_the_examples_are_read_as_the_file_says() -> None:
    for case in CASES:
        assert outcome(case["filter"]) == case


def test_the_examples_name_each_key_and_come_to_each_refusal() -> None:
    used = {term["key"] for case in CASES for term in case.get("terms", [])}
    assert used == set(KEYS)
    assert len({case["filter"] for case in CASES}) == len(CASES) >= 80
    code = ast.parse(Path(filters.__file__).read_text(encoding="utf-8"))
    raised = {node.lineno for node in ast.walk(code) if isinstance(node, ast.Raise)}
    reached = set()
    for case in CASES:
        try:
            parse(case["filter"])
        except FilterError as error:
            reached |= {line for _, line in traceback.walk_tb(error.__traceback__)} & raised
    assert reached == raised and len(raised) > 20


def test_a_place_is_within_the_text_and_a_sentence_is_one() -> None:
    for case in CASES:
        if "error" in case:
            assert 0 <= case["at"] <= len(case["filter"])
            assert case["error"].endswith(".") and len(case["error"]) < 260


def test_any_text_is_read_or_refused(seed: int) -> None:
    """Nothing but FilterError comes out; the terms stand in order within the text; each is read alone as it was."""
    draw = random.Random(seed)
    pieces = [
        *KEYS,
        *STATES,
        *':<>=-"\\/,. \t*',
        "..",
        ">=",
        "1h",
        "5",
        "10k",
        "/a/i",
        '"a b"',
        "x",
        "é",
        "\U0001d4b3",
        "\x00",
    ]
    read = 0
    for _ in range(3_000):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 12)))
        try:
            terms = parse(text)
        except FilterError as error:
            assert 0 <= error.at <= len(text) <= FILTER_CHARS_MAX and str(error)
            continue
        end = 0
        for term in terms:
            assert end <= term.begin < term.end <= len(text)
            assert not text[end : term.begin].strip(" \t\r\n")
            end = term.end
            (alone,) = parse(text[term.begin : term.end])
            assert alone == term._replace(begin=0, end=term.end - term.begin)
            read += 1
    assert read > 100


def test_a_term_that_is_cut_off_is_refused_or_read_as_something_shorter() -> None:
    """No prefix of an example makes the reader stumble."""
    for case in CASES:
        for end in range(min(len(case["filter"]), 80)):
            outcome(case["filter"][:end])
