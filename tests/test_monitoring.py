"""Prometheus's alerts and Grafana's board in conf/: what they name is there, and each alert is explained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.process import ROOT

CONF = ROOT / "conf"
METRICS = ROOT / "docs" / "metrics.md"  # test_http_metrics.py holds its table against what a server gives
OPERATING = ROOT / "docs" / "operating.md"
RULES: list[dict[str, Any]] = yaml.safe_load((CONF / "alerts.yaml").read_text())["groups"][0]["rules"]
BOARD: dict[str, Any] = json.loads((CONF / "grafana" / "geventstalk.json").read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
OF_PROMETHEUS = {"up"}


def told() -> dict[str, set[str]]:
    """The labels of all samples that /metrics may have, by name."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\|", METRICS.read_text(), re.M):
        names = set(re.findall(r"`(\w+)`", labels)) | {"job", "instance"}
        if kind == "histogram":
            found |= {f"{name}_bucket": names | {"le"}, f"{name}_sum": names, f"{name}_count": names}
        else:
            found[name] = names
    return found


def names_of(expression: str) -> set[str]:
    """The metrics that an expression asks for: words that are neither functions nor labels nor numbers."""
    bare = re.sub(r'\{[^}]*\}|\[[^\]]*\]|"[^"]*"|\b(?:by|on|without|ignoring) \([^)]*\)', " ", expression)
    words = set(re.findall(r"[a-z_][a-z0-9_]*(?![a-z0-9_]*\s*\()", bare))
    return {word for word in words if "_" in word and not re.search(rf"\b{word}\s*\(", bare)} | (words & OF_PROMETHEUS)


def test_names_are_found_in_expressions() -> None:
    found = names_of('up{a="b_c"} == 1e9 and sum by (le, x_y) (rate(geventstalk_a_bucket{b_c=~"$d_e"}[$__f_g])) > 0')
    assert found == {"up", "geventstalk_a_bucket"}


@pytest.mark.parametrize("expression", [*[rule["expr"] for rule in RULES], *EXPRESSIONS])
def test_what_is_asked_for_is_told(expression: str) -> None:
    metrics = told()
    names = names_of(expression) - OF_PROMETHEUS
    assert names <= metrics.keys()
    assert names or "up" in expression
    for name, labels in re.findall(r"(\w+)\{([^}]*)\}", expression):
        if name not in OF_PROMETHEUS:
            assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", labels)) <= metrics[name]


def test_every_state_and_event_that_is_named_is_one() -> None:
    text = (CONF / "alerts.yaml").read_text() + "".join(EXPRESSIONS)
    assert set(re.findall(r'state!?="(\w+)"', text)) <= {"urgent", "ready", "reserved", "delayed", "buried"}
    assert set(re.findall(r'event!?="(\w+)"', text)) <= {
        "put",
        "reserve",
        "delete",
        "release",
        "bury",
        "kick",
        "timeout",
    }


def test_each_alert_is_explained_and_tried() -> None:
    text = OPERATING.read_text()
    section = text[text.index("## What to watch") :]
    explained = re.findall(r"^### `(\w+)`$", section, re.M)
    assert explained == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/operating.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")
    tried: set[tuple[str, bool]] = set()
    for test in yaml.safe_load((CONF / "alerts.test.yaml").read_text())["tests"]:
        tried |= {(each["alertname"], "exp_alerts" in each) for each in test["alert_rule_test"]}
    assert tried == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}


def test_the_board_asks_for_its_source_and_its_servers() -> None:
    variables = {each["name"]: each["type"] for each in BOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    places: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & places and place["x"] + place["w"] <= 24, panel["title"]
        places |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}" and "$instance" in target["expr"]
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Is it well?", "Is work flowing?", "Which tube hurts?", "Journal", "Memory and processor"]


def promtool(*words: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_understands_the_alerts() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(CONF / "alerts.yaml"))


# Bug: GeventstalkNoConsumer was silent about a backlog that does not move.
def test_alerts_begin_and_end_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(CONF / "alerts.test.yaml"))


def test_promtool_understands_the_board(tmp_path: Path) -> None:
    """Its expressions, with values for Grafana's variables, as rules."""
    expressions = [each.replace("$__rate_interval", "5m").replace("$instance", ".*") for each in EXPRESSIONS]
    rules = [{"record": f"board:{number}", "expr": each} for number, each in enumerate(expressions)]
    path = tmp_path / "board.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))
