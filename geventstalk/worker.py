"""Workers: functions as jobs, and threads that take jobs and run something for each.

This module must not know the server, nor command lines; it needs the standard library only, and works with beanstalkd.
Invariant: a job is deleted only when its work was done, over the connection that has reserved it: the id may be that of
another job once a server without a journal began anew. In all other cases it goes back, for a later try, or is buried.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

from geventstalk.client import (
    BadFormat,
    BeanstalkError,
    Client,
    DeadlineSoon,
    Forbidden,
    Job,
    NotFound,
    ServerError,
    TimedOut,
    Unauthorized,
)

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_ADDRESS: Final = "127.0.0.1:11300"
_LOOK_S: Final = 1
"""Seconds that a reserve waits before the worker checks whether it is to end."""
_TOUCH_PART: Final = 3
"""A job is touched when this part of its time to run is over."""
_DELAY_MAX_S: Final = (1 << 32) - 1
_NO_CALL: Final = "the body is no call of a task that is known here"
_LOG: Final = logging.getLogger("geventstalk.worker")


class Backoff(NamedTuple):
    """The delay in seconds before another try: `first`, then `factor` times the one before, at most `most`."""

    first: float = 5.0
    factor: float = 2.0
    most: float = 3600.0

    def after(self, tries: int) -> int:
        """Returns the delay after this many tries."""
        try:
            grown = float(self.factor) ** max(0, tries - 1)
        except OverflowError:
            grown = sys.float_info.max
        return int(min(self.most, self.first * grown))


_BACKOFF: Final = Backoff()


class Bury(Exception):
    """Raised by a task when no further try can help: the job is buried."""


class Retry(Exception):
    """Raised by a task when the job is to be tried again after this many seconds, or as its backoff says."""

    def __init__(self, delay_s: int | None = None) -> None:
        super().__init__(delay_s)
        self.delay_s = delay_s


class Attempt(NamedTuple):
    """A job that a worker holds: its tube, how often it was handed out, this time included, its time to run, and its
    priority.
    """

    job: Job
    tube: str
    tries: int
    ttr_s: int
    priority: int


Handler = Callable[[Attempt], None]
"""Does the work of a job. Raises Bury, Retry, or any other exception for a try that failed."""


class Task(Generic[P, T]):
    """A function whose calls can be put as jobs. Called as it is, it runs here."""

    def __init__(self, tasks: Tasks, function: Callable[P, T], options: dict[str, Any]) -> None:
        self._tasks = tasks
        self._function = function
        self.name: str = options["name"] or function.__name__
        self.tube: str = options["tube"]
        self.tries: int = options["tries"]
        self.backoff: Backoff = options["backoff"]
        self.timeout_s: float | None = options["timeout"]
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._function(*args, **kwargs)

    def put(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Puts a call as a job; returns the job's id. Raises TypeError for what JSON cannot hold."""
        return self.put_with()(*args, **kwargs)

    def put_with(self, *, priority: int = 1 << 16, delay: int = 0, ttr: int = 60, tags: str = "") -> Callable[P, int]:
        """Returns put() with other numbers, and with tags for geventstalk's server."""

        def put(*args: P.args, **kwargs: P.kwargs) -> int:
            body = json.dumps({"task": self.name, "args": args, "kwargs": kwargs}, separators=(",", ":"))
            return self._tasks.put(self.tube, body, priority=priority, delay=delay, ttr=ttr, tags=tags)

        return put


class Tasks:
    """The tasks of a program, and the connection for their puts, which all threads share."""

    def __init__(
        self, address: str | Sequence[str] = DEFAULT_ADDRESS, *, tls: ssl.SSLContext | None = None, token: str = ""
    ) -> None:
        self.by_name: dict[str, Task[Any, Any]] = {}
        self._address = address
        self._tls = tls
        self._token = token
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """A fork has a connection of its own. A thread that it does not have may have held the lock."""
        self._lock = threading.Lock()
        self._client: Client | None = None

    def close(self) -> None:
        """Closes the connection; another put opens one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def put(self, tube: str, body: str, **numbers: Any) -> int:
        """Puts a job into a tube, with what Client.put() takes; returns the job's id."""
        with self._lock:
            if self._client is None:
                self._client = Client(self._address, use=tube, tls=self._tls, token=self._token)
            self._client.use(tube)
            return self._client.put(body, **numbers)

    def task(
        self,
        *,
        tube: str = "default",
        tries: int = 3,
        timeout: float | None = None,
        backoff: Backoff = _BACKOFF,
        name: str = "",
    ) -> Callable[[Callable[P, T]], Task[P, T]]:
        """Makes a function a task: its jobs go into this tube, and are buried after so many tries that failed.

        A worker touches a job while it runs, for `timeout` seconds at most. Raises ValueError when the name is taken.
        """

        def made(function: Callable[P, T]) -> Task[P, T]:
            options = {"tube": tube, "tries": tries, "timeout": timeout, "backoff": backoff, "name": name}
            task = Task(self, function, options)
            if self.by_name.setdefault(task.name, task) is not task:
                raise ValueError(f"there is a task named {task.name} already")
            return task

        return made

    @property
    def tubes(self) -> list[str]:
        """The tubes of all tasks."""
        return sorted({task.tube for task in self.by_name.values()})

    def worker(self, address: str | Sequence[str] | None = None) -> Worker:
        """Returns a worker for these tasks, of the server that they are put into unless `address` names another."""
        where = self._address if address is None else address
        return Worker(self.run, self.tubes, where, self.policy_of, tls=self._tls, token=self._token)

    def run(self, attempt: Attempt) -> None:
        """Does the work of a job: a Handler. A body that is no call of a task is buried."""
        task, args, kwargs = self._call_of(attempt)
        task(*args, **kwargs)

    def policy_of(self, attempt: Attempt) -> Policy:
        """Returns the terms of a job: those of its task."""
        try:
            task, _, _ = self._call_of(attempt)
        except Bury:
            return Policy()
        return Policy(task.tries, task.backoff, task.timeout_s)

    def _call_of(self, attempt: Attempt) -> tuple[Task[Any, Any], list[Any], dict[str, Any]]:
        """Returns the task that a body calls, and its arguments. Raises Bury."""
        try:
            call = json.loads(attempt.job.body)
            task, args, kwargs = self.by_name[call["task"]], call["args"], call["kwargs"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Bury(_NO_CALL) from None
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise Bury(_NO_CALL)
        return task, args, kwargs


class Policy(NamedTuple):
    """After how many tries a job is buried, how long it waits before each, and how long it is touched."""

    tries: int = 3
    backoff: Backoff = _BACKOFF
    timeout_s: float | None = None


class _Touches:
    """Touches a job while a block runs. The client is not used otherwise meanwhile."""

    def __init__(self, client: Client, attempt: Attempt, timeout_s: float | None) -> None:
        self._client = client
        self._attempt = attempt
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._touch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _touch(self) -> None:
        while not self._ended.wait(max(0.2, self._attempt.ttr_s / _TOUCH_PART)):
            if self._until_s is not None and time.monotonic() >= self._until_s:
                return
            try:
                self._client.touch(self._attempt.job.id)
            except BeanstalkError as error:
                _LOG.warning("job %d cannot be touched: %s", self._attempt.job.id, error)
                return


class Worker:
    """One thread that takes jobs of some tubes and runs the handler for each. `done` and `failed` count them."""

    def __init__(
        self,
        handler: Handler,
        tubes: Sequence[str],
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        policy_of: Callable[[Attempt], Policy] = lambda attempt: Policy(),
        *,
        tls: ssl.SSLContext | None = None,
        token: str = "",
    ) -> None:
        self.done = 0
        self.failed = 0
        self._handler = handler
        self._client = Client(address, watch=tubes, tls=tls, token=token)
        self._policy_of = policy_of
        self._ends = threading.Event()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def stop(self) -> None:
        """Has run() return after the job that is under way."""
        self._ends.set()

    def run(self) -> None:
        """Works until stop(). Waits for a server that is away, or that has a fault.

        Raises Unauthorized, or Forbidden where the user may not watch a tube.
        """
        with self:
            while not self._ends.is_set():
                try:
                    self.work_once(_LOOK_S)
                except (Unauthorized, Forbidden):
                    raise
                except BeanstalkError as error:
                    _LOG.warning("%s; trying again", error)
                    self._ends.wait(_LOOK_S)

    def work_once(self, timeout_s: int = 0) -> bool:
        """Takes a job and works on it. Returns whether there was a job within this many seconds."""
        try:
            job = self._client.reserve_with_timeout(timeout_s)
        except TimedOut:
            return False
        except DeadlineSoon:  # a job whose end the server did not take goes back within a second
            self._ends.wait(_LOOK_S)
            return False
        connection = self._client.connection
        attempt = self._attempt_of(job)
        if attempt is not None and self._client.connection == connection:
            self._work(attempt, connection)
        return True

    def _attempt_of(self, job: Job) -> Attempt | None:
        try:
            facts = self._client.stats_job(job.id)
        except NotFound:  # its time to run was over
            return None
        return Attempt(job, str(facts["tube"]), int(facts["reserves"]), int(facts["ttr"]), int(facts["pri"]))

    def _work(self, attempt: Attempt, connection: int) -> None:
        client, job, policy = self._client, attempt.job, self._policy_of(attempt)
        delay_s: int | None = policy.backoff.after(attempt.tries)
        try:
            with _Touches(client, attempt, policy.timeout_s):
                self._handler(attempt)
        except Bury as error:
            why, delay_s = str(error), None
        except Retry as error:
            why = "it asks for another try"
            delay_s = delay_s if error.delay_s is None else error.delay_s
        except Exception as error:
            _LOG.debug("job %d failed", job.id, exc_info=True)
            why = f"{type(error).__name__}: {error}"
        else:
            self._end(attempt, "was done", lambda: client.delete(job.id, connection=connection))
            self.done += 1
            return
        self.failed += 1
        if delay_s is None or attempt.tries >= policy.tries:
            _LOG.error("job %d of %s is buried after try %d: %s", job.id, attempt.tube, attempt.tries, why)
            self._end(attempt, "failed", lambda: self._bury(attempt, why))
        else:
            _LOG.warning("job %d of %s failed in try %d: %s", job.id, attempt.tube, attempt.tries, why)
            delay_s = min(max(0, int(delay_s)), _DELAY_MAX_S)
            self._end(attempt, "failed", lambda: client.release(job.id, priority=attempt.priority, delay=delay_s))

    def _bury(self, attempt: Attempt, why: str) -> None:
        """Buries a job, and tells a server that keeps it why."""
        id, priority = attempt.job.id, attempt.priority
        reason = "".join(each if each.isprintable() else " " for each in why).strip()
        try:
            self._client.bury(id, priority=priority, reason="" if reason.isdecimal() else reason)
        except BadFormat:
            self._client.bury(id, priority=priority)

    def _end(self, attempt: Attempt, what: str, end: Callable[[], object]) -> None:
        try:
            end()
        except NotFound:
            _LOG.warning("job %d %s, and is another worker's by now", attempt.job.id, what)
        except ServerError as error:
            _LOG.warning("job %d %s, and stays reserved until its time is over: %s", attempt.job.id, what, error)
