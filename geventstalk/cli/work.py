"""geventstalk work: runs the tasks of a Python module, or a command for each job of a tube."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click

from geventstalk.cli.client import Context, client_command
from geventstalk.cli.ending import Failed
from geventstalk.cli.params import Whole
from geventstalk.client import BeanstalkError
from geventstalk.config import ENV_OF_JOB
from geventstalk.exits import EXIT_NOT_ALLOWED, EXIT_OK, EXIT_USAGE
from geventstalk.worker import Attempt, Backoff, Policy, Tasks, Worker

_JOBS_MAX: Final = 256
_TIMES: Final = click.FloatRange(0)


@client_command("work")
@click.option("--jobs", "-j", metavar="N", type=Whole(1, _JOBS_MAX), default=1, help="Jobs at a time. Default: 1.")
@click.option("--tries", metavar="N", type=Whole(1, 1 << 31), default=3, help="Tries of each job. Default: 3.")
@click.option("--backoff", metavar="S", type=_TIMES, default=5.0, help="Seconds before the second try. Default: 5.")
@click.argument("what")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def work(context: Context, jobs: int, tries: int, backoff: float, what: str, command: tuple[str, ...]) -> int:
    """Work on jobs until a signal comes.

    WHAT is a tube when a COMMAND follows: it is run for each job, with the body on its standard input and the job's
    GEVENTSTALK_ID, GEVENTSTALK_TUBE and GEVENTSTALK_TRIES in its environment. Exit code 0 deletes the job. After any
    other the job is released with a delay, which doubles with each try, and buried after its last try.

    Without a COMMAND, WHAT is a Python module or MODULE:NAME, whose Tasks are run: see docs/workers.md. Their server is
    that of the Tasks, unless an option or the environment names another. The first SIGTERM or SIGINT lets the jobs end
    that have begun, the second ends at once.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    if command:
        if shutil.which(command[0]) is None:
            raise Failed(f"there is no command {command[0]}", EXIT_USAGE)
        policy = Policy(tries, Backoff(backoff))
        make: Callable[[], Worker] = partial(
            Worker,
            partial(_run, command),
            [what],
            str(context.address),
            lambda attempt: policy,
            tls=context.tls,
            token=context.token_of_worker,
        )
    else:
        if context.wants_tls or context.token_of_worker:
            raise click.UsageError("a module's Tasks have their own TLS and token; these options are for a COMMAND")
        tasks = _tasks_of(what)
        if not tasks.by_name:
            raise Failed(f"{what} has no tasks", EXIT_USAGE)
        make = partial(tasks.worker, str(context.address) if context.is_named else None)
    workers = [make() for _ in range(jobs)]
    _serve(workers)
    done, failed = sum(each.done for each in workers), sum(each.failed for each in workers)
    context.say(f"done: {done}, failed: {failed}")
    return EXIT_OK


def _serve(workers: list[Worker]) -> None:
    """Runs the workers until a signal has come and their jobs have ended. Raises Failed when the server refuses one."""
    refused: list[BeanstalkError] = []
    threads = [threading.Thread(target=_run_one, args=(each, workers, refused), daemon=True) for each in workers]
    told = threading.Event()

    def stop(number: int, frame: Any) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()
        for each in workers:
            each.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # so that signals are handled
    if refused:
        raise Failed(str(refused[0]), EXIT_NOT_ALLOWED)


def _run_one(worker: Worker, workers: list[Worker], refused: list[BeanstalkError]) -> None:
    """Runs a worker, and stops all when the server refuses it."""
    try:
        worker.run()
    except BeanstalkError as error:
        refused.append(error)
        for each in workers:
            each.stop()


def _tasks_of(what: str) -> Tasks:
    """Returns the tasks of MODULE or MODULE:NAME."""
    module, _, name = what.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Failed(f"there is no Python module {error.name}; a COMMAND would follow a tube", EXIT_USAGE) from None
    named = [getattr(found, name, None)] if name else [each for each in vars(found).values() if isinstance(each, Tasks)]
    if len(named) != 1 or not isinstance(named[0], Tasks):
        raise Failed(f"{what} names no Tasks, or several: give MODULE:NAME", EXIT_USAGE)
    return named[0]


def _run(command: tuple[str, ...], attempt: Attempt) -> None:
    """Runs the command for a job. Raises for an exit code other than 0."""
    more = dict(zip(ENV_OF_JOB, (str(attempt.job.id), attempt.tube, str(attempt.tries)), strict=True))
    with tempfile.TemporaryFile() as body:
        body.write(attempt.job.body)
        body.seek(0)
        done = subprocess.run(command, stdin=body, env=os.environ | more, check=False, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}")
