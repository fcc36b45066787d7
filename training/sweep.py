"""Commands side by side, each in a process of its own with its own log: on this machine, or as tasks of Ray.

A command ends when the program that started it ends, however that ends, and holds a lock on its folder: after a kill and a new
start no two work on the same files. This file imports nothing heavy, since every worker of Ray reads it.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1
SECONDS_FOR_A_LOCK = 10.0
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Job:
    """A command that works in a folder; what it prints goes to folder/log.txt, behind what is there."""

    name: str
    command: tuple[str, ...]
    folder: Path
    threads: int = 1


@dataclass(frozen=True)
class End:
    """How a command ended."""

    status: int
    """Exit status; minus the number of the signal that killed it."""
    peak_memory_mb: float


class Engine(Protocol):
    """What runs jobs."""

    def start(self, job: Job) -> None:
        """Start a job, at once or as soon as there is room."""

    def ended(self) -> list[tuple[Job, End]]:
        """The jobs that ended since the last call, without waiting."""

    def stop(self) -> None:
        """Kill what still runs."""


class Processes:
    """Jobs as processes of this machine."""

    def __init__(self) -> None:
        self.running: dict[Job, subprocess.Popen[bytes] | None] = {}

    def start(self, job: Job) -> None:
        self.running[job] = start(job)

    def ended(self) -> list[tuple[Job, End]]:
        ends = [(job, end) for job, process in self.running.items() if (end := wait(process, os.WNOHANG))]
        for job, _ in ends:
            del self.running[job]
        return ends

    def stop(self) -> None:
        for process in filter(None, self.running.values()):
            process.kill()
        for process in self.running.values():
            wait(process)
        self.running.clear()


class Ray:
    """Jobs as tasks of a local Ray, which this object starts and ends; at most `jobs` at a time."""

    def __init__(self, jobs: int) -> None:
        import ray

        self.ray = ray
        ray.init(
            address="local",
            num_cpus=jobs,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="error",
        )
        self.task = ray.remote(num_cpus=1, max_retries=0)(run)
        self.running: dict[Any, Job] = {}

    def start(self, job: Job) -> None:
        self.running[self.task.remote(job)] = job

    def ended(self) -> list[tuple[Job, End]]:
        ready, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=0) if self.running else ([], [])
        return [(self.running.pop(reference), self._end(reference)) for reference in ready]

    def stop(self) -> None:
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.running.clear()
        self.ray.shutdown()

    def _end(self, reference):
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError:  # its worker was killed, and so the command
            return End(-signal.SIGKILL, 0.0)


def run(job: Job) -> End:
    """Run a job to its end."""
    end = wait(start(job))
    assert end is not None  # it waited
    return end


def start(job: Job) -> "subprocess.Popen[bytes] | None":
    """Start a job; None, and a line in its log, where another process holds its folder."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        log = opened.enter_context((job.folder / "log.txt").open("a"))
        lock = _lock(job.folder / "lock")
        if lock is None:
            log.write(f"another process works in {job.folder}\n")
            return None
        opened.enter_context(lock)
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads)},
            pass_fds=(lock.fileno(),),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def wait(process: "subprocess.Popen[bytes] | None", options: int = 0) -> End | None:
    """How a process of `start` ended; None if it still runs, which os.WNOHANG does not wait for."""
    if process is None:
        return End(1, 0.0)
    pid, status, usage = os.wait4(process.pid, options)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return End(process.returncode, usage.ru_maxrss / 1024)


def _lock(path: Path) -> TextIO | None:
    """The open file whose lock lasts as long as any process has it open; a process that is being killed has a moment left."""
    file, deadline = path.open("w"), time.monotonic() + SECONDS_FOR_A_LOCK
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.05)


def _die_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
