"""A server that answers the console by the contract of the API, from a world that is made up.

For what a real server cannot be made to show in a moment: 10,000 tubes with a history, answers that are late or wrong,
a server that goes and comes back, a reader's role. `python -m tests.support.console` serves it for a person to look at.
The figures move with time; changes change them. It judges nothing: whether requests are right, the real server says.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from geventstalk.core.job import SECOND_NS
from geventstalk.filters import FilterError, parse
from geventstalk.http.api.console import FOR_EVER, PAGES, File, Files, load
from geventstalk.http.history import RANGES, TUBE_RANGES
from geventstalk.remote.sampling import trouble_of

Answer = tuple[int, Any]
STATES = ("ready", "reserved", "delayed", "buried")
WORDS = [
    *("mail", "thumbs", "report", "invoice", "index", "crawl", "sync", "push", "export", "audit.log", "geo"),
    *("search", "cache", "video", "ocr"),
]
TOTALS = ("put", "reserve", "delete", "release", "bury", "kick", "timeout")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
BODIES = (
    '{"to": "user42@example.org", "template": "welcome", "tries": 2, "tags": ["new", "eu"]}',
    "photo-%d.jpg",
    "<img src=x onerror=alert(1)><script>alert(2)</script> %d",
    "resize 1280x720 s3://bucket/uploads/2026/11/22/%d.png",
    '{"invoice": %d, "lines": [{"sku": "A-1", "n": 3}, {"sku": "B-7", "n": 1}], "paid": false}',
)


def jobs_in(state: str) -> Callable[[dict[str, Any]], int]:
    """Returns how many jobs of a tube are in this state."""
    return lambda tube: int(tube["jobs"][state])


class World:
    """The objects behind a made-up server, and its answers. `slow_s`, `broken` and `down` make it misbehave."""

    def __init__(self, tubes: int = 40, jobs: int = 400, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.began = time.time() - 277_000
        self.role = "admin"
        self.slow_s = 0.0
        self.broken: set[str] = set()
        self.gates: dict[str, threading.Event] = {}  # requests about such a resource wait for it
        self.waiting = 0
        self.with_events = True
        self.over = False  # ends the streams of events
        self.problems: list[dict[str, str]] = []
        self.draining = False
        self.node: dict[str, Any] | None = None
        self.name, self.name_color = "queue-1", "red"
        self.leader = "one"
        self.requests: list[tuple[str, str]] = []
        self.tubes = {tube["name"]: tube for tube in map(self._tube, range(tubes))}
        names = list(self.tubes)[: max(1, min(tubes, 12))]
        self.jobs = (
            {number: self._job(number, names[number % len(names)]) for number in range(1, jobs + 1)} if tubes else {}
        )
        self.bulks: list[dict[str, Any]] = []
        self.entries = [self._entry(number) for number in range(1, 61)]
        self.connections = [self._connection(number) for number in range(1, 48)]
        self.rights: dict[str, list[str]] | None = None
        self.kept = {
            "policies": {"*": self._kept("policies", "*", None)},
            "schedules": {"nightly": self._kept("schedules", "nightly", None)},
        }
        self.done: list[dict[str, Any]] = []
        self.users = [self._user(name) for name in ("mailer", "ops", "shop")]

    # --- the world

    def _tube(self, at: int) -> dict[str, Any]:
        rng = self.rng
        word = WORDS[at % len(WORDS)]
        name = word if at < len(WORDS) else f"{word}.{at:05d}"
        busy = at < 12 or rng.random() < 0.1
        ready = int(rng.paretovariate(0.7)) * 3 if busy else 0
        watching = rng.randrange(0, 9)
        put = rng.expovariate(0.05) if busy else 0.0
        growth = rng.gauss(0, put / 8) if busy else 0.0
        paused = 3600 if at % 17 == 3 else 0
        tube = {
            "name": name,
            "jobs": {
                "urgent": ready // 9,
                "ready": min(ready, 250_000),
                "reserved": rng.randrange(20) if watching and busy else 0,
                "delayed": rng.randrange(300) if busy and at % 3 == 0 else 0,
                "buried": rng.randrange(1500) if busy and at % 4 == 0 else 0,
            },
            "ages": {state: rng.expovariate(1 / 900) if busy else None for state in STATES},
            "latency": {key: self._quantiles(0.02 if key == "queued" else 0.3, busy) for key in ("queued", "worked")},
            "rates": {
                "put": {"m1": put, "m15": put * 0.9},
                "reserve": {"m1": put - growth, "m15": put * 0.88},
                "delete": {"m1": put - growth, "m15": put * 0.87},
                "timeout": {"m1": put / 90, "m15": put / 80},
                "bury": {"m1": put / 200, "m15": put / 150},
            },
            "totals": {key: int(put * 277_000) for key in TOTALS},
            "using": rng.randrange(4),
            "watching": watching,
            "waiting": rng.randrange(watching + 1),
            "paused_s": paused,
            "pause_left_s": paused * 0.7,
            "growth": growth,
            "spark": [max(0, int(ready * (1 + 0.3 * math.sin(at + n / 4)))) if n > 3 else None for n in range(30)],
        }
        return tube | {"trouble": trouble_of(tube)._asdict()}

    def _quantiles(self, typical: float, busy: bool) -> dict[str, Any]:
        p50 = self.rng.lognormvariate(math.log(typical), 1)
        if not busy:
            return {"p50": None, "p95": None, "p99": None, "count": 0}
        return {"p50": p50, "p95": p50 * 6, "p99": p50 * 25, "count": self.rng.randrange(10**7)}

    def _job(self, number: int, tube: str) -> dict[str, Any]:
        rng = self.rng
        state = rng.choices(STATES, weights=(6, 1, 2, 3))[0]
        body = rng.choice(BODIES)
        text = body % number if "%d" in body else body
        data: dict[str, Any] = {"encoding": "text", "data": text, "whole": True}
        size = len(text)
        if number % 23 == 0:
            raw = bytes(rng.randrange(256) for _ in range(90))
            data, size = {"encoding": "base64", "data": base64.b64encode(raw).decode(), "whole": True}, 90
        age = rng.expovariate(1 / 4000)
        return {
            "id": number,
            "tube": tube,
            "state": state,
            "pri": rng.choice((0, 10, 1024, 65536)),
            "age_s": age,
            "created": time.time() - age,
            "delay_s": 30 if state == "delayed" else 0,
            "ttr_s": 120,
            "time_left_s": 17.5 if state in ("delayed", "reserved") else None,
            "since_s": age * rng.random(),
            "size": size,
            "counts": {key: rng.randrange(4) for key in ("reserves", "timeouts", "releases", "buries", "kicks")},
            "holder": 7 if state == "reserved" else None,
            "segment": 3,
            "body": data,
        }

    def _entry(self, number: int) -> dict[str, Any]:
        action = self.rng.choice(("kick", "pause", "delete", "bulk delete", "move", "put"))
        return {
            "number": number,
            "at": time.time() - (61 - number) * 1700,
            "who": self.rng.choice(("ops", "anna-laptop", "deploy")),
            "role": "admin",
            "from": "10.0.3.14",
            "via": self.rng.choice(("api", "console", "cli")),
            "action": action,
            "tube": self.rng.choice(("mail", "thumbs", None)),
            "job": number if action in ("kick", "put") else None,
            "filter": "tube:mail state:buried age>1h" if action == "bulk delete" else None,
            "detail": None,
            "count": self.rng.randrange(1, 3000),
        }

    def _kept(self, kind: str, name: str, entry: dict[str, Any] | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"at_run_time": entry is not None, "entry": entry}
        if kind == "schedules":
            plan = {
                "cron": "0 3 * * *",
                "zone": "UTC",
                "tube": "reports",
                "missed": "skip",
                "next": int(self.began) + 280_000,
                "last": None,
            }
            return {"name": name, **shown, **plan, **(entry or {})}
        bounds = {key: {"min": int(key == "ttr"), "max": 2**32 - 1} for key in ("priority", "delay", "ttr")}
        limits = {key: (entry or {}).get(key) for key in ("max_jobs", "max_bytes", "max_job_bytes", "max_rate")}
        kept = {
            "pause": False,
            "keep": {"jobs": 0, "seconds": 0},
            "events": False,
            "refused_puts": 0,
            "delayed_puts": 0,
        }
        return {"tubes": name, **shown, "tags": ["tries:5"], **bounds, **limits, **kept}

    def _user(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "shown_by": {"certificate": "shop.example.org", "address": ["10.1.0.0/16"]}
            if name == "shop"
            else {"token": True},
            "rights": {"ops": {"*": ["put", "work", "look", "manage", "operate"]}}.get(
                name, {"mail.*": ["put"], "orders": ["put", "look"]}
            ),
            "limits": {"connections": 100, "puts_per_second": 500, "puts_burst": 1000} if name == "mailer" else {},
            "connections": sum(each["user"] == name for each in self.connections),
            "reserved": 12,
            "commands": 81_204,
            "puts": 40_100,
            "delayed_puts": 31,
            "refused_commands": 3 if name == "shop" else 0,
            "refused_connections": 0,
        }

    def _connection(self, number: int) -> dict[str, Any]:
        rng = self.rng
        worker = number % 3 > 0
        watches = rng.sample(WORDS, rng.randrange(1, 6)) if worker else ["default"]
        return {
            "number": number,
            "user": (None, "shop", "mailer")[number % 3],
            "address": f"10.0.{number % 5}.{rng.randrange(255)}:{rng.randrange(2000, 65000)}"
            if number % 9
            else "unix: worker (812) www:www",
            "listener": "0.0.0.0:11300",
            "connected": time.time() - rng.expovariate(1 / 40_000),
            "idle_s": rng.expovariate(0.5),
            "uses": rng.choice(WORDS),
            "watches": watches,
            "watching": len(watches),
            "reserved": rng.randrange(4) if worker else 0,
            "waiting_s": rng.expovariate(0.1) if worker and number % 2 else None,
            "held_up": number == 4,
            "input_bytes": 0,
            "output_bytes": 18_000 if number == 5 else 0,
            "producer": not worker,
            "worker": worker,
        }

    def move(self) -> None:
        """Time goes on: a few figures change."""
        for tube in list(self.tubes.values())[:12]:
            tube["jobs"]["ready"] = max(0, tube["jobs"]["ready"] + self.rng.randrange(-4, 5))
            tube["trouble"] = trouble_of(tube)._asdict()

    @contextmanager
    def held(self, resource: str) -> Iterator[None]:
        """Answers about this resource wait until this is over. Who clears `gates` lets later ones through before."""
        gate = self.gates[resource] = threading.Event()
        try:
            yield
        finally:
            self.gates.pop(resource, None)
            gate.set()

    # --- what is answered

    def server(self) -> dict[str, Any]:
        every = list(self.tubes.values())
        total = {key: sum(tube["jobs"][key] for tube in every) for key in ("urgent", *STATES)}
        now = time.time()
        rates = {
            key: {span: sum(tube["rates"][key][span] for tube in every) for span in ("m1", "m15")}
            for key in ("put", "reserve", "delete", "timeout", "bury")
        }
        return {
            "well": {"ok": not self.problems, "problems": self.problems},
            "version": "0.2.0",
            "build": "compiled",
            "pid": 4711,
            "hostname": "queue-1",
            "name": self.name,
            "name_color": self.name_color,
            "started": self.began,
            "uptime_s": now - self.began,
            "now": now,
            "draining": self.draining,
            "listen": ["0.0.0.0:11300"],
            "http": ["127.0.0.1:11380"],
            "jobs": total,
            "ages": {state: max((t["ages"][state] or 0 for t in every), default=None) for state in STATES},
            "latency": {
                key: {"p50": base, "p95": base * 7, "p99": base * 30, "count": 812_331}
                for key, base in (("queued", 0.012), ("worked", 0.24))
            },
            "rates": rates,
            "totals": {key: sum(tube["totals"][key] for tube in every) for key in TOTALS},
            "tubes": len(every),
            "connections": {"open": 47, "producers": 16, "workers": 31, "waiting": 14, "total": 90_211},
            "memory": {
                "resident_bytes": 183_000_000,
                "limit_bytes": 4 << 30,
                "bodies": {
                    "max_bytes": 64 << 20,
                    "bytes": 61_200_000,
                    "jobs_on_disk": 9_120,
                    "bytes_on_disk": 91_400_000,
                    "loads": 48_211,
                    "refused_puts": 0,
                },
            },
            "journal": {
                "policy": "-f50",
                "bytes": 62_000_000,
                "budget_bytes": 1 << 30,
                "disk_free_bytes": 38 << 30,
                "last_fsync": now - 0.04,
                "fsync_p99_s": 0.004,
                "writable": True,
            },
            "max_job_bytes": 65535,
            "node": self.node,
        }

    replication = "synchronous"

    def cluster(self) -> dict[str, Any]:
        nodes = [
            {
                "node": name, "address": f"10.0.0.{at}:11300", "role": "active" if name == self.leader else "standby",
                "epoch": 7, "lag": 12 * at, "seen_s": 0.4,
            }
            for at, name in enumerate(("one", "two", "three"))
        ]  # fmt: skip
        told = {"leader": self.leader, "last": self.leader, "claims": None, "epoch": 7, "lease_s": 1.0, "wish": None}
        told |= {"replication": self.replication, "takeover_s": 7500.0}
        return told | {"nodes": nodes, "console": "http://127.0.0.1:9/"}

    def tube_page(self, query: dict[str, str]) -> Answer:
        words = [re.compile(".*".join(map(re.escape, word.split("*")))) for word in query.get("match", "").split()]
        tests: dict[str, Callable[[dict[str, Any]], object]] = {
            **{state: jobs_in(state) for state in (*STATES, "urgent")},
            "paused": lambda t: t["paused_s"] > 0,
            "no-consumer": lambda t: t["watching"] == 0,
            "growing": lambda t: t["growth"] > 0,
        }
        only = [tests[name] for name in query.get("only", "").split(",") if name]
        tubes = [t for t in self.tubes.values() if t["name"].startswith(query.get("prefix", ""))]
        found = [t for t in tubes if all(w.search(t["name"]) for w in words) and all(test(t) for test in only)]
        order: dict[str, Callable[[dict[str, Any]], Any]] = {
            "name": lambda t: t["name"],
            "total": lambda t: sum(t["jobs"].values()),
            "trouble": lambda t: (-t["trouble"]["score"], t["name"]),
            **{state: jobs_in(state) for state in STATES},
            "oldest_ready": lambda t: t["ages"]["ready"] or 0,
            "put_rate": lambda t: t["rates"]["put"]["m1"],
            "delete_rate": lambda t: t["rates"]["delete"]["m1"],
            "growth": lambda t: t["growth"],
            "watching": lambda t: t["watching"],
        }
        found.sort(key=order[query.get("sort", "name")], reverse=query.get("descending") == "true")
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 100))
        return 200, {"tubes": found[offset : offset + limit], "total": len(found)}

    def groups(self) -> dict[str, Any]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, tube in self.tubes.items():
            if found := re.match(r"[^./;_-]+[./;_-]", name):
                groups.setdefault(found[0], []).append(tube)
        shown = [
            {
                "prefix": prefix,
                "tubes": len(tubes),
                "jobs": {s: sum(t["jobs"][s] for t in tubes) for s in tubes[0]["jobs"]},
            }
            for prefix, tubes in sorted(groups.items(), key=lambda group: -len(group[1]))
            if len(tubes) > 1
        ]
        return {"groups": shown[:50], "total": len(shown)}

    def tube(self, name: str) -> Answer:
        tube = self.tubes.get(name)
        if tube is None:
            return 404, {"title": "Not Found", "status": 404, "detail": f"There is no tube {name}."}
        first = {
            s: next((j for j in self.jobs.values() if j["tube"] == name and j["state"] == s), None)
            for s in ("ready", "delayed", "buried")
        }
        return 200, {**tube, "next": first, "users": [3, 9], "watchers": list(range(20, 20 + tube["watching"]))}

    def selected(self, text: str) -> list[dict[str, Any]]:
        found = list(self.jobs.values())
        for term in text.split():
            key, _, value = term.partition(":")
            if key == "tube":
                found = [job for job in found if job["tube"] == value]
            elif key == "state":
                found = [job for job in found if job["state"] in value.split(",")]
            elif not re.match(r"[a-z]+[:<>]", term) or key == "body":
                word = term.removeprefix("body:").strip('"')
                found = [job for job in found if word in job["body"]["data"]]
        return found

    def job_page(self, query: dict[str, str]) -> Answer:
        try:
            parse(query.get("filter", ""))
        except FilterError as error:
            detail = f"Filter, character {error.at + 1}: {error}"
            return 400, {"title": "Bad Request", "detail": detail, "status": 400, "at": error.at}
        found = self.selected(query.get("filter", ""))
        if query.get("descending") == "true":
            found.reverse()
        at, limit = int(query.get("cursor") or 0), int(query.get("limit", 50))
        more = at + limit < len(found)
        return 200, {
            "jobs": found[at : at + limit],
            "next": str(at + limit) if more else None,
            "searched": len(self.jobs),
        }

    def act(self, job: dict[str, Any], action: str) -> Answer:
        job["state"] = {"kick": "ready", "bury": "buried", "release": "ready"}[action]
        job["holder"] = job["time_left_s"] = None
        return 200, job

    def begin(self, request: dict[str, Any]) -> Answer:
        found = self.selected(request["filter"])
        bulk = {
            "number": 0, "filter": request["filter"], "action": request["action"], "tube": request.get("tube"),
            "state": "dry-run", "by": "local", "began": time.time(), "took_s": 0.01, "searched": len(self.jobs),
            "matched": len(found), "done": 0, "failed": 0, "jobs_before": len(self.jobs), "error": None,
            "parts": [], "parts_total": 0,
        }  # fmt: skip
        if request.get("dry_run"):
            parts = Counter((job["tube"], job["state"]) for job in found)
            shown = [{"tube": tube, "state": state, "count": n} for (tube, state), n in parts.most_common(20)]
            return 200, {**bulk, "parts": shown, "parts_total": len(parts)}
        bulk.update(number=len(self.bulks) + 1, state="running", ids=[job["id"] for job in found])
        self.bulks.append(bulk)
        return 202, self.shown(bulk)

    def step(self, bulk: dict[str, Any]) -> None:
        """Does some more of the work at each look."""
        for number in bulk["ids"][: max(20, len(bulk["ids"]) // 5)]:
            bulk["ids"].remove(number)
            bulk["done"] += 1
            job = self.jobs[number]
            if bulk["action"] == "delete":
                del self.jobs[number]
                self.tubes[job["tube"]]["jobs"][job["state"]] = max(
                    0, self.tubes[job["tube"]]["jobs"][job["state"]] - 1
                )
            elif bulk["action"] == "move":
                job["tube"] = bulk["tube"]
            elif bulk["action"] != "change":
                self.act(job, bulk["action"])
        bulk["took_s"] = time.time() - bulk["began"]
        bulk["searched"] = bulk["jobs_before"] * bulk["done"] // max(1, bulk["done"] + len(bulk["ids"]))
        if not bulk["ids"]:
            bulk["state"] = "done"

    def shown(self, bulk: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in bulk.items() if key != "ids"}

    def journal(self) -> dict[str, Any]:
        segments: list[dict[str, Any]] = [
            {
                "number": n,
                "state": "current" if n == 6 else "sealed",
                "bytes": 10_485_760 - (6_000_000 if n == 6 else 0),
                "live_bytes": int(10_485_760 * (0.05 + n / 8)) if n < 6 else 4_000_000,
                "records": n * 9200,
            }
            for n in range(1, 7)
        ] + [{"number": 7, "state": "spare", "bytes": 10_485_760, "live_bytes": 0, "records": 0}]
        live = sum(segment["live_bytes"] for segment in segments)
        return {
            "directory": "/var/lib/geventstalk", "policy": "-f50", "bytes": 62_000_000,
            "live_bytes": min(live, 40_000_000),
            "dead_bytes": 62_000_000 - min(live, 40_000_000), "budget_bytes": 1 << 30, "disk_free_bytes": 38 << 30,
            "writable": True, "compacting": True, "moved": 81_233, "refused_puts": 0, "replay_s": 1.31,
            "last_fsync": time.time() - 0.04,
            "fsyncs": {"p50": 0.0007, "p95": 0.0021, "p99": 0.004, "count": 190_211},
            "commits": {"count": 4_122_001, "records": 19_221_410, "records_max": 512}, "segments": segments,
        }  # fmt: skip

    def history(self, span: str, name: str | None) -> dict[str, Any]:
        step_ns, points = (RANGES if name is None else TUBE_RANGES)[span]
        step = step_ns / SECOND_NS
        to = time.time() // step * step
        of = self.server() if name is None else self.tubes.get(name)
        series: dict[str, list[float | None]] = {}

        def wave(key: str, middle: float, phase: float) -> None:
            noise = random.Random(key)
            series[key] = [
                None
                if at < points // 12 or of is None
                else max(0.0, middle * (1 + 0.35 * math.sin(at / 23 + phase) + noise.gauss(0, 0.04)))
                for at in range(points)
            ]

        for at, key in enumerate(("put", "reserve", "delete", "timeout", "bury")):
            wave(key, of["rates"][key]["m1"] if of else 0, at * 0.15)
        for at, key in enumerate(STATES):
            wave(key, of["jobs"][key] if of else 0, at)
        if name is not None or of is None:
            return {"step_s": step, "from": to - step * (points - 1), "to": to, "series": series}
        for what in ("queued", "worked"):
            for q in ("p50", "p95", "p99"):
                wave(f"{what}_{q}", of["latency"][what][q], 0.3)
        wave("memory_bytes", 183e6, 1)
        wave("journal_bytes", 62e6, 2)
        return {"step_s": step, "from": to - step * (points - 1), "to": to, "series": series}

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        first, *rest = path.split("/")[3:]
        parts = [first, "/".join(rest)] if first == "tubes" and rest else [first, *rest]
        match method, parts:
            case "GET", ["cluster"] if self.node is not None:
                return 200, self.cluster()
            case "POST", ["cluster"]:
                self.leader = body["promote"]
                return 200, self.cluster()
            case "GET", ["session"]:
                return 200, {
                    "role": self.role,
                    "name": "local",
                    "csrf": None,
                    "users": self.node is None,
                    "sees_all": self.rights is None,
                    "rights": self.rights,
                }
            case "GET", ["server"]:
                self.move()
                return 200, self.server()
            case "PATCH", ["server"]:
                self.draining = body["draining"]
                return 200, self.server()
            case "GET", ["tubes"]:
                return self.tube_page(query)
            case "GET", ["tube-groups"]:
                return 200, self.groups()
            case "GET", ["tube"]:
                return self.tube(query["name"])
            case "PATCH", ["tube"]:
                name = query["name"]
                self.tubes[name].update(paused_s=body["pause_s"], pause_left_s=body["pause_s"])
                return 200, self.tubes[name]
            case "GET", ["jobs"]:
                return self.job_page(query)
            case "POST", ["jobs"]:
                number = max(self.jobs, default=0) + 1
                self.jobs[number] = {
                    **self._job(number, body["tube"]),
                    "state": "ready",
                    "age_s": 0.0,
                    "created": time.time(),
                    "holder": None,
                }
                if "body" in body:
                    self.jobs[number]["body"] = {"encoding": "text", "data": body["body"], "whole": True}
                return 201, self.jobs[number]
            case _, ["jobs", number, *rest] if not number.isdigit() or int(number) not in self.jobs:
                return 404, {"title": "Not Found", "status": 404, "detail": f"There is no job {number}."}
            case "GET", ["jobs", number]:
                return 200, self.jobs[int(number)]
            case "PATCH", ["jobs", number]:
                self.jobs[int(number)].update(body)
                return 200, self.jobs[int(number)]
            case "DELETE", ["jobs", number]:
                del self.jobs[int(number)]
                return 204, None
            case "POST", ["jobs", number, action]:
                return self.act(self.jobs[int(number)], action)
            case "GET", ["bulk"]:
                return 200, {"bulk": [self.shown(bulk) for bulk in reversed(self.bulks)]}
            case "POST", ["bulk"]:
                return self.begin(body)
            case "GET", ["bulk", number]:
                self.step(self.bulks[int(number) - 1])
                return 200, self.shown(self.bulks[int(number) - 1])
            case "DELETE", ["bulk", number]:
                self.bulks[int(number) - 1]["state"] = "cancelled"
                return 200, self.shown(self.bulks[int(number) - 1])
            case "GET", ["connections"]:
                found = [
                    c for c in self.connections if not query.get("tube") or query["tube"] in (*c["watches"], c["uses"])
                ]
                found = [c for c in found if query.get("user") in (None, "", c["user"])]
                return 200, {"connections": found, "total": len(found)}
            case "GET", ["policies" | "schedules" as kind]:
                return 200, {kind: [*self.kept[kind].values()]}
            case "PUT", ["policies" | "schedules" as kind, name]:
                if "wrong" in body:
                    return 400, {"title": "Bad Request", "status": 400, "detail": "a policy has no key wrong"}
                self.kept[kind][name] = self._kept(kind, name, body)
                return 204, None
            case "DELETE", ["policies" | "schedules" as kind, name]:
                del self.kept[kind][name]
                return 204, None
            case "GET", ["done"]:
                return 200, {"done": self.done, "total": len(self.done)}
            case "GET", ["users"]:
                return 200, {"users": self.users, "total": len(self.users)}
            case _, ["connections", number] if all(c["number"] != int(number) for c in self.connections):
                return 404, {"title": "Not Found", "status": 404, "detail": "There is no such connection."}
            case "GET", ["connections", number]:
                return 200, next(c for c in self.connections if c["number"] == int(number))
            case "DELETE", ["connections", number]:
                self.connections = [c for c in self.connections if c["number"] != int(number)]
                return 204, None
            case "GET", ["journal"]:
                return 200, self.journal()
            case "GET", ["audit"]:
                before = int(query.get("before", 10**9))
                words = query.get("match", "").split()
                found = [
                    e for e in reversed(self.entries) if e["number"] < before and all(w in json.dumps(e) for w in words)
                ]
                return 200, {
                    "entries": found[: int(query.get("limit", 100))],
                    "file": "/var/log/geventstalk/audit.jsonl",
                }
            case "GET", ["history"]:
                return 200, self.history(query.get("range", "15m"), query.get("tube"))
        return 404, {"title": "Not Found", "status": 404, "detail": "Nothing is there."}

    def events(self, query: dict[str, str]) -> Iterator[bytes]:
        names = [name for name in query.get("tubes", "").split(",") if name in self.tubes]
        while not self.over:
            if gate := self.gates.get("events"):
                gate.wait(20)
            self.move()
            data = {"server": self.server(), "tubes": [self.tubes[name] for name in names]}
            yield f"event: figures\ndata: {json.dumps(data)}\n\n".encode()
            time.sleep(1)


LONG_NAME = "a" * 60 + "." + "W" * 139


class WideWorld(World):
    """Names, numbers and texts as long as a server lets them be, without a space in them."""

    def __init__(self) -> None:
        super().__init__(12, 120)
        many, long_s = 2**32 - 1, 2.0**32
        self.name = "W" * 60
        self.problems = [{"about": "work", "text": f"1 tube needs attention: {LONG_NAME}.", "page": "tubes"}]
        for at, tube in enumerate(self.tubes.values()):
            tube["name"] = LONG_NAME[at:]
            tube["jobs"] = dict.fromkeys(tube["jobs"], many)
            tube["ages"] = dict.fromkeys(tube["ages"], long_s)
            tube["rates"] = {key: {"m1": 1234567.8, "m15": 1234567.8} for key in tube["rates"]}
            tube["totals"] = dict.fromkeys(tube["totals"], 2**53)
            tube["latency"] = {
                key: {"p50": long_s, "p95": long_s, "p99": long_s, "count": 2**53} for key in tube["latency"]
            }
            tube.update(growth=1234567.8, using=9999, watching=9999, waiting=9999, paused_s=many, pause_left_s=many)
            tube["trouble"] = trouble_of(tube)._asdict()
        self.tubes = {tube["name"]: tube for tube in self.tubes.values()}
        for job in self.jobs.values():
            body = {"encoding": "text", "data": "x" * 5000, "whole": True}
            job.update(tube=LONG_NAME, body=body, size=many, pri=many, delay_s=many, ttr_s=many, age_s=long_s)
            job.update(
                state="reserved" if job["id"] == 6 else "ready",
                holder=2**53,
                segment=2**53,
                counts=dict.fromkeys(job["counts"], many),
            )
        words = f"tube:{LONG_NAME} body:{'y' * 400}"
        for entry in self.entries:
            entry.update(who="w" * 64, job=2**53, tube=LONG_NAME, filter=words, detail="d" * 200, count=many)
            entry["from"] = "unix: " + "c" * 90
        for connection in self.connections:
            connection.update(address="unix: " + "c" * 90, uses=LONG_NAME, watches=list(self.tubes), watching=9999)
            connection.update(reserved=many, waiting_s=long_s, idle_s=long_s, output_bytes=1 << 50, held_up=True)
        self.bulks = [
            {
                "number": 1, "filter": words, "action": "move", "tube": LONG_NAME, "state": "running", "by": "w" * 64,
                "began": time.time(), "took_s": 1.0, "searched": many, "matched": many, "done": many, "failed": 0,
                "jobs_before": 2 * many, "error": None,
            }
        ]  # fmt: skip

    def move(self) -> None:
        pass

    def server(self) -> dict[str, Any]:
        told = super().server()
        told.update(version="0.2.0.dev1234+g0123456789abcdef.d20261122", listen=["unix:/" + "p" * 100])
        told["journal"].update(policy="-f4294967295", bytes=1 << 60, budget_bytes=1 << 60, disk_free_bytes=1 << 60)
        return told

    def journal(self) -> dict[str, Any]:
        return {**super().journal(), "directory": "/" + "d" * 1000, "writable": False, "moved": 2**53}


class Application:
    """WSGI: the console's files, and the world behind /api/v1."""

    def __init__(self, world: World, files: Files) -> None:
        self.world = world
        self.files = files

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        self.world.requests.append((method, path))
        if path.startswith("/api/v1/"):
            return self._api(environ, start_response, method, path)
        name = path.split("/")
        file: File | None = self.files.page
        caching = "no-cache"
        if name[1] == "assets":
            file, caching = self.files.find(name[2], "/".join(name[3:])), FOR_EVER
        headers = [("Content-Security-Policy", CSP), ("X-Content-Type-Options", "nosniff")]
        if file is None or name[1] == "favicon.ico":
            start_response("404 Not Found", headers)
            return [b""]
        headers += [("Content-Type", file.content_type), ("Cache-Control", caching)]
        if file.packed:
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK" if name[1] in ("", "assets", *PAGES) else "404 Not Found", headers)
        return [file.packed or file.plain]

    def _api(
        self, environ: dict[str, Any], start_response: Callable[..., Any], method: str, path: str
    ) -> Iterable[bytes]:
        world = self.world
        query = {key: values[0] for key, values in parse_qs(environ["QUERY_STRING"]).items()}
        resource = path.split("/")[3]
        if resource == "events" and world.with_events and "events" not in world.broken:
            start_response("200 OK", [("Content-Type", "text/event-stream"), ("Cache-Control", "no-store")])
            return world.events(query)
        time.sleep(world.slow_s)
        if gate := world.gates.get(resource):
            world.waiting += 1
            gate.wait(20)
            world.waiting -= 1
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = json.loads(environ["wsgi.input"].read(length)) if length else {}
        said: Any
        if resource in world.broken:
            status, said = 500, {"title": "Internal Server Error", "status": 500, "detail": "The server has a fault."}
        elif method != "GET" and world.role != "admin":
            status, said = 403, {"title": "Forbidden", "status": 403, "detail": "The token may only read."}
        else:
            status, said = world.answer(method, path, query, body)
        kind = "application/json" if status < 400 else "application/problem+json"
        start_response(f"{status} x", [("Content-Type", kind), ("Cache-Control", "no-store")])
        return [b"" if said is None else json.dumps(said).encode()]


class _Handler(WSGIRequestHandler):
    """Says nothing, and takes it calmly when a browser goes away in the middle of an answer."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()


class Server(ThreadingMixIn, WSGIServer):
    """A server of this world on 127.0.0.1 that has begun, in a thread of its own. Call stop() at the end."""

    daemon_threads = True

    def __init__(self, world: World, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._files = load()
        self.show(world)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def show(self, world: World) -> None:
        """From now on another world."""
        self.world = world
        self.set_app(Application(world, self._files))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the browser went away

    def stop(self) -> None:
        self.world.over = True
        self.shutdown()
        self.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=11381)
    parser.add_argument("--tubes", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--role", default="admin")
    options = parser.parse_args()
    world = World(options.tubes, options.jobs)
    world.role = options.role
    server = Server(world, options.port)
    print(server.url, flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
