"""Commands side by side, each in a process of its own with its own log: on this machine, or as tasks of Ray.

A command ends when the program that started it ends, however that ends, and holds a lock on its folder: after a kill and a new
start no two work on the same files. This file imports nothing heavy, since every worker of Ray reads it.
"""

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1
SECONDS_FOR_A_LOCK = 10.0
FOLDER_IN_USE = 1
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Job:
    """A command that works in a folder; what it prints goes to folder/log.txt, behind what is there."""

    name: str
    command: tuple[str, ...]
    folder: Path
    threads: int = 1


class Engine(Protocol):
    """What runs jobs."""

    def start(self, job: Job) -> None:
        """Start a job, at once or as soon as there is room."""

    def ended(self) -> list[tuple[Job, int]]:
        """The jobs that ended since the last call, and their exit statuses (minus the signal that killed them); never waits."""

    def stop(self) -> None:
        """Kill what still runs."""


class Processes:
    """Jobs as processes of this machine."""

    def __init__(self) -> None:
        self.running: dict[Job, subprocess.Popen[bytes] | None] = {}

    def start(self, job: Job) -> None:
        self.running[job] = start(job)

    def ended(self) -> list[tuple[Job, int]]:
        polled = [(job, process.poll() if process else FOLDER_IN_USE) for job, process in self.running.items()]
        ends = [(job, status) for job, status in polled if status is not None]
        for job, _ in ends:
            del self.running[job]
        return ends

    def stop(self) -> None:
        processes = [process for process in self.running.values() if process]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        self.running.clear()


class Ray:
    """Jobs as tasks of a local Ray, which this object starts and ends; at most `jobs` at a time.

    Each sees one of so many GPUs, which it may share with others, and none where these are 0.
    """

    def __init__(self, jobs: int, gpus: int = 0) -> None:
        import ray

        self.ray = ray
        ray.init(
            address="local",
            num_cpus=jobs,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="error",
        )
        share = 10_000 // math.ceil(jobs / gpus) / 10_000 if gpus else 0  # Ray counts ten thousandths
        self.task = ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(run)
        self.running: dict[Any, Job] = {}

    def start(self, job: Job) -> None:
        self.running[self.task.remote(job)] = job

    def ended(self) -> list[tuple[Job, int]]:
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
            return -signal.SIGKILL


def run(job: Job) -> int:
    """Run a job to its end; returns its exit status."""
    process = start(job)
    return process.wait() if process else FOLDER_IN_USE


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
            preexec_fn=die_with_parent,
        )


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


def die_with_parent() -> None:
    """Kill this process when the one that started it has ended, however that ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
