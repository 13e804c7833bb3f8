"""A work queue to compare with: lists, linear scans, no timers, no counters kept, nothing clever.

It does what SPEC.md section 3 says and is meant to be read beside it. Time comes in as integer nanoseconds. What falls
due is a list of happenings (`due`), each of which the caller lets come to pass (`happen`): in which order those of one
moment come is not promised, so that is left to the caller, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.clock import SECOND

URGENT_BELOW = 1024


@dataclass
class ModelJob:
    """`since` orders what has no other order: the burying of a buried job, the reservation of a reserved one.

    `since_ns` is when the job came into its state.
    """

    id: int
    tube: str
    pri: int
    delay_s: int
    ttr_s: int
    state: str = "uploading"
    deadline_ns: int = 0
    holder: str = ""
    since: int = 0
    created_ns: int = 0
    since_ns: int = 0
    reserves: int = 0
    timeouts: int = 0
    releases: int = 0
    buries: int = 0
    kicks: int = 0


@dataclass
class ModelClient:
    """`waits_since` is 0 for a client that does not wait; `waits_until_ns` is None for ever."""

    name: str
    used: str = "default"
    watched: list[str] = field(default_factory=lambda: ["default"])
    waits_since: int = 0
    waits_until_ns: int | None = None
    producer: bool = False
    worker: bool = False


@dataclass
class ModelPast:
    """Counts of the events of jobs, and every single time in nanoseconds."""

    puts: int = 0
    reserves: int = 0
    deletes: int = 0
    releases: int = 0
    buries: int = 0
    kicks: int = 0
    timeouts: int = 0
    queued: list[int] = field(default_factory=list)
    worked: list[int] = field(default_factory=list)

    def totals(self) -> tuple[int, ...]:
        return self.puts, self.reserves, self.deletes, self.releases, self.buries, self.kicks, self.timeouts


@dataclass
class ModelTube:
    name: str
    paused: bool = False
    paused_until_ns: int = 0
    pause_s: int = 0
    pauses: int = 0
    past: ModelPast = field(default_factory=ModelPast)


Answer = tuple[str, str, int]
"""Who waited, the word it was told, and the job's id or 0."""

Happening = tuple[str, str, int]
"""What falls due: `expire` and `mature` with a job's id, `unpause` with a tube, `wait` with a client."""


@dataclass
class Model:
    """All there is. `answers` collects what waiting clients were told, in order."""

    jobs: list[ModelJob] = field(default_factory=list)
    clients: list[ModelClient] = field(default_factory=list)
    tubes: list[ModelTube] = field(default_factory=lambda: [ModelTube("default")])
    answers: list[Answer] = field(default_factory=list)
    draining: bool = False
    next_id: int = 1
    order: int = 0
    total_clients: int = 0
    past: ModelPast = field(default_factory=ModelPast)

    # --- finding

    def job(self, id: int) -> ModelJob | None:
        """The job, unless it is still on its way."""
        return next((job for job in self.jobs if job.id == id and job.state != "uploading"), None)

    def client(self, name: str) -> ModelClient:
        return next(client for client in self.clients if client.name == name)

    def tube(self, name: str) -> ModelTube | None:
        return next((tube for tube in self.tubes if tube.name == name), None)

    def jobs_in(self, tube: str, state: str) -> list[ModelJob]:
        """A tube's jobs of one state, first one first."""
        found = [job for job in self.jobs if job.tube == tube and job.state == state]
        if state == "ready":
            return sorted(found, key=lambda job: (job.pri, job.id))
        if state == "delayed":
            return sorted(found, key=lambda job: (job.deadline_ns, job.id))
        return sorted(found, key=lambda job: job.since)

    def held_by(self, name: str) -> list[ModelJob]:
        """In order of reservation."""
        return sorted((job for job in self.jobs if job.holder == name), key=lambda job: job.since)

    def waiting(self) -> list[ModelClient]:
        """Who has waited longest comes first."""
        return sorted((client for client in self.clients if client.waits_since), key=lambda client: client.waits_since)

    def oldest(self, tube: str, state: str) -> int | None:
        """When the oldest job of this state was put, in this tube or in all."""
        return min((job.created_ns for job in self.jobs if job.state == state and tube in ("", job.tube)), default=None)

    # --- commands

    def join(self, name: str) -> None:
        self.clients.append(ModelClient(name))
        self.total_clients += 1

    def use(self, name: str, tube: str) -> None:
        self.client(name).used = tube
        self._tidy(tube)

    def watch(self, name: str, tube: str) -> int:
        watched = self.client(name).watched
        if tube not in watched:
            watched.append(tube)
        self._tidy(tube)
        return len(watched)

    def ignore(self, name: str, tube: str) -> int:
        watched = self.client(name).watched
        if watched == [tube]:
            return 0
        if tube in watched:
            watched.remove(tube)
        self._tidy()
        return len(watched)

    def pause(self, tube_name: str, delay_s: int, now_ns: int) -> bool:
        tube = self.tube(tube_name)
        if tube is None:
            return False
        tube.pauses += 1
        tube.pause_s = delay_s
        tube.paused = delay_s > 0
        tube.paused_until_ns = now_ns + delay_s * SECOND
        self._serve(now_ns)
        return True

    def open_put(self, name: str, pri: int, delay_s: int, ttr_s: int, now_ns: int) -> int:
        client = self.client(name)
        client.producer = True
        self.jobs.append(ModelJob(self.next_id, client.used, pri, delay_s, ttr_s, created_ns=now_ns))
        self.next_id += 1
        return self.next_id - 1

    def abandon_put(self, id: int) -> None:
        self.jobs = [job for job in self.jobs if job.id != id]
        self._tidy()

    def put(self, id: int, now_ns: int) -> str:
        if self.draining:
            self.abandon_put(id)
            return "DRAINING"
        job = next(job for job in self.jobs if job.id == id)
        for past in self._pasts(job):
            past.puts += 1
        job.since_ns = now_ns
        if job.delay_s:
            job.state = "delayed"
            job.deadline_ns = now_ns + job.delay_s * SECOND
        else:
            job.state = "ready"
            self._serve(now_ns)
        return "INSERTED"

    def reserve(self, name: str, timeout_s: int, now_ns: int) -> tuple[str, int]:
        """RESERVED and the id, DEADLINE_SOON, TIMED_OUT, or WAITING. A timeout of -1 is for ever."""
        client = self.client(name)
        client.worker = True
        job = self._best(client.watched)
        if job is not None:
            self._hold(name, job, now_ns)
            return "RESERVED", job.id
        if self._deadline_soon(name, now_ns):
            return "DEADLINE_SOON", 0
        if timeout_s == 0:
            return "TIMED_OUT", 0
        client.waits_since = self._next()
        client.waits_until_ns = None if timeout_s < 0 else now_ns + timeout_s * SECOND
        return "WAITING", 0

    def stop_waiting(self, name: str) -> None:
        self.client(name).waits_since = 0

    def reserve_job(self, name: str, id: int, now_ns: int) -> bool:
        job = self.job(id)
        if job is None or job.state == "reserved":
            return False
        self.client(name).worker = True
        self._hold(name, job, now_ns)
        return True

    def delete(self, name: str, id: int, now_ns: int) -> bool:
        job = self.job(id)
        if job is None or job.holder not in ("", name):
            return False
        for past in self._pasts(job):
            past.deletes += 1
        self._end_work(job, now_ns)
        self.jobs.remove(job)
        self._tidy()
        return True

    def release(self, name: str, id: int, pri: int, delay_s: int, now_ns: int) -> bool:
        job = self.job(id)
        if job is None or job.holder != name:
            return False
        self._end_work(job, now_ns)
        job.holder, job.pri, job.delay_s = "", pri, delay_s
        job.releases += 1
        for past in self._pasts(job):
            past.releases += 1
        if delay_s:
            job.state = "delayed"
            job.deadline_ns = now_ns + delay_s * SECOND
        else:
            job.state = "ready"
            self._serve(now_ns)
        return True

    def bury(self, name: str, id: int, pri: int, now_ns: int) -> bool:
        job = self.job(id)
        if job is None or job.holder != name:
            return False
        self._end_work(job, now_ns)
        job.holder, job.pri, job.state = "", pri, "buried"
        job.since = self._next()
        job.buries += 1
        for past in self._pasts(job):
            past.buries += 1
        return True

    def touch(self, name: str, id: int, now_ns: int) -> bool:
        job = self.job(id)
        if job is None or job.holder != name:
            return False
        job.deadline_ns = now_ns + job.ttr_s * SECOND
        return True

    def kick(self, name: str, bound: int, now_ns: int) -> int:
        tube = self.client(name).used
        jobs = self.jobs_in(tube, "buried") or self.jobs_in(tube, "delayed")
        for job in jobs[:bound]:
            self._kick(job, now_ns)
        return min(bound, len(jobs))

    def kick_job(self, id: int, now_ns: int) -> bool:
        job = self.job(id)
        if job is None or job.state not in ("buried", "delayed"):
            return False
        self._kick(job, now_ns)
        return True

    def peek(self, name: str, state: str) -> int:
        """The first job's id, or 0."""
        jobs = self.jobs_in(self.client(name).used, state)
        return jobs[0].id if jobs else 0

    def give_back(self, name: str, count: int, now_ns: int) -> None:
        """The client is gone; some of what it held goes back, first reserved first."""
        self.client(name).waits_since = 0
        for job in self.held_by(name)[:count]:
            self._end_work(job, now_ns)
            job.holder, job.state = "", "ready"
            self._serve(now_ns)

    def forget(self, name: str) -> None:
        """The client is gone and holds nothing any more."""
        assert not self.held_by(name)
        self.clients.remove(self.client(name))
        self._tidy()

    # --- what an operator does

    def open_put_to(self, tube: str, pri: int, delay_s: int, ttr_s: int, now_ns: int) -> int:
        self.jobs.append(ModelJob(self.next_id, tube, pri, delay_s, ttr_s, created_ns=now_ns))
        self.next_id += 1
        self._tidy(tube)
        return self.next_id - 1

    def kick_one(self, id: int, now_ns: int) -> str:
        job = self.job(id)
        if job is None:
            return "NOT_FOUND"
        return "DONE" if self.kick_job(id, now_ns) else "WRONG_STATE"

    def force_delete(self, id: int, now_ns: int) -> str:
        job = self.job(id)
        if job is None:
            return "NOT_FOUND"
        self.delete(job.holder, id, now_ns)
        return "DONE"

    def force_release(self, id: int, now_ns: int) -> str:
        job = self.job(id)
        if job is None or job.state != "reserved":
            return "NOT_FOUND" if job is None else "WRONG_STATE"
        self.release(job.holder, id, job.pri, 0, now_ns)
        return "DONE"

    def force_bury(self, id: int, now_ns: int) -> str:
        job = self.job(id)
        if job is None or job.state == "buried":
            return "NOT_FOUND" if job is None else "WRONG_STATE"
        self.bury(job.holder, id, job.pri, now_ns)
        return "DONE"

    def alter(self, id: int, pri: int, delay_s: int, ttr_s: int, tube: str, now_ns: int) -> str:
        """-1 and an empty name leave it as it is."""
        job = self.job(id)
        if job is None:
            return "NOT_FOUND"
        moves = tube not in ("", job.tube)
        if job.state == "reserved" and (pri >= 0 or delay_s >= 0 or moves):
            return "WRONG_STATE"
        if job.state == "buried" and delay_s >= 0:
            return "WRONG_STATE"
        if pri >= 0:
            job.pri = pri
        if ttr_s >= 0:
            job.ttr_s = max(ttr_s, 1)
            if job.state == "reserved":
                job.deadline_ns = now_ns + job.ttr_s * SECOND
        if delay_s >= 0:
            job.delay_s = delay_s
            state = "delayed" if delay_s else "ready"
            job.since_ns = job.since_ns if state == job.state else now_ns
            job.state = state
            job.deadline_ns = now_ns + delay_s * SECOND
        if moves:
            job.tube = tube
            self._tidy(tube)
        self._serve(now_ns)
        return "DONE"

    # --- time

    def deadlines(self) -> list[int]:
        """Every moment at which something is to happen, early ones first."""
        moments = [job.deadline_ns for job in self.jobs if job.state in ("reserved", "delayed")]
        moments += [tube.paused_until_ns for tube in self.tubes if tube.paused]
        for client in self.waiting():
            moments += [job.deadline_ns - SECOND for job in self.held_by(client.name)]
            if client.waits_until_ns is not None:
                moments.append(client.waits_until_ns)
        return sorted(moments)

    def due(self, now_ns: int) -> list[Happening]:
        """Returns what is to happen by now."""
        found: list[Happening] = []
        for job in self.jobs:
            if job.deadline_ns <= now_ns and job.state in ("reserved", "delayed"):
                found.append(("expire" if job.state == "reserved" else "mature", "", job.id))
        found += [("unpause", tube.name, 0) for tube in self.tubes if tube.paused and tube.paused_until_ns <= now_ns]
        found += [("wait", client.name, 0) for client in self.waiting() if self._end_of_wait(client, now_ns)]
        return found

    def happen(self, happening: Happening, now_ns: int) -> None:
        """Lets one of these happen; it may have become pointless through another."""
        kind, name, id = happening
        if kind == "wait":
            client = self.client(name)
            word = self._end_of_wait(client, now_ns)
            if client.waits_since and word:
                self._answer(client, word, 0)
        elif kind == "unpause":
            tube = self.tube(name)
            assert tube is not None
            tube.paused, tube.pause_s = False, 0
        else:
            job = self.job(id)
            assert job is not None
            if kind == "expire":
                self._end_work(job, now_ns)
                job.holder = ""
                job.timeouts += 1
                for past in self._pasts(job):
                    past.timeouts += 1
            job.state, job.since_ns = "ready", now_ns
        self._serve(now_ns)

    # --- inside

    def _next(self) -> int:
        self.order += 1
        return self.order

    def _end_of_wait(self, client: ModelClient, now_ns: int) -> str:
        if self._deadline_soon(client.name, now_ns):
            return "DEADLINE_SOON"
        timed_out = client.waits_until_ns is not None and client.waits_until_ns <= now_ns
        return "TIMED_OUT" if timed_out else ""

    def _deadline_soon(self, name: str, now_ns: int) -> bool:
        return any(now_ns >= job.deadline_ns - SECOND for job in self.held_by(name))

    def _best(self, tubes: list[str]) -> ModelJob | None:
        """The ready job of the smallest priority, then id, in those of the tubes that are not paused."""
        ready = [job for tube in self.tubes if tube.name in tubes and not tube.paused for job in self._ready(tube)]
        return min(ready, key=lambda job: (job.pri, job.id), default=None)

    def _ready(self, tube: ModelTube) -> list[ModelJob]:
        return self.jobs_in(tube.name, "ready")

    def _serve(self, now_ns: int) -> None:
        """Gives each job to be had, the best one first, to the client that has waited longest for its tube."""
        while True:
            wanted = [tube for client in self.waiting() for tube in client.watched]
            job = self._best(wanted)
            if job is None:
                return
            client = next(client for client in self.waiting() if job.tube in client.watched)
            self._hold(client.name, job, now_ns)
            self._answer(client, "RESERVED", job.id)

    def _answer(self, client: ModelClient, word: str, id: int) -> None:
        client.waits_since = 0
        self.answers.append((client.name, word, id))

    def _pasts(self, job: ModelJob) -> tuple[ModelPast, ModelPast]:
        """Those of the server and of the job's tube."""
        tube = self.tube(job.tube)
        assert tube is not None
        return self.past, tube.past

    def _end_work(self, job: ModelJob, now_ns: int) -> None:
        """The job is not reserved any longer, if it was."""
        if job.state == "reserved":
            for past in self._pasts(job):
                past.worked.append(now_ns - job.since_ns)
        job.since_ns = now_ns

    def _hold(self, name: str, job: ModelJob, now_ns: int) -> None:
        for past in self._pasts(job):
            past.reserves += 1
            if job.state == "ready":
                past.queued.append(now_ns - job.since_ns)
        job.state, job.holder, job.since_ns = "reserved", name, now_ns
        job.reserves += 1
        job.since = self._next()
        job.deadline_ns = now_ns + job.ttr_s * SECOND

    def _kick(self, job: ModelJob, now_ns: int) -> None:
        job.state, job.since_ns = "ready", now_ns
        job.kicks += 1
        for past in self._pasts(job):
            past.kicks += 1
        self._serve(now_ns)

    def _tidy(self, *wanted: str) -> None:
        """Tubes that are referred to come into being, in order of being asked for; others end. `default` stays."""
        needed = {job.tube for job in self.jobs}
        for client in self.clients:
            needed |= {client.used, *client.watched}
        self.tubes = [tube for tube in self.tubes if tube.name == "default" or tube.name in needed]
        for name in wanted:
            if self.tube(name) is None:
                self.tubes.append(ModelTube(name))
