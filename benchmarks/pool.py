"""The processes of the contenders: one computes while the others wait, all of them below one memory cap."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from benchmarks import memory
from benchmarks.plans import Contender, Plan, Workload
from benchmarks.towers import Grid
from benchmarks.worker import Job, Numbers, serve
from vlexport.backends import EngineSpec
from vlexport.evaluate.bench import SETTLE_S

LOOK_EVERY_S = 0.2
SPAWN = multiprocessing.get_context("spawn")


class Failure(Exception):  # noqa: N818  a finding about a contender
    """The reason that a contender gives no answer."""

    def __init__(self, reason: str, *, too_slow: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.too_slow = reason, too_slow


class Child:
    """One contender's process, which ends when the pipe closes; `ready` names the workload that it runs."""

    def __init__(self, job: Job, environment: dict[str, str], cap: int) -> None:
        self._cap = cap
        self.ready = ""
        self._pipe, other = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(other, job), daemon=True)
        with patch.dict(os.environ, environment):
            self._process.start()
        other.close()

    def send(self, seconds: float, verb: str, *given: object) -> Any:
        """Return the answer; raise `Failure` for an error, too late, too large, gone."""
        deadline = time.monotonic() + seconds
        try:
            self._pipe.send((verb, given))
            while not self._pipe.poll(LOOK_EVERY_S):
                if self._cap and self.held() > self._cap:
                    raise Failure(f"more than the cap of {self._cap / 2**30:.1f} GiB of memory")
                if time.monotonic() > deadline:
                    raise Failure("more than the time allowed", too_slow=True)
            answer, error = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            raise Failure(f"the process ended with {self._process.exitcode}") from None
        if error:
            raise Failure(error)
        return answer

    def held(self) -> int:
        return memory.own(self._process.pid or 0)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@dataclass(kw_only=True)
class Pool:
    """Children by contender; the one used longest ago makes room for the next.

    memory_cap  bytes of all together, 0 for no limit
    """

    plan: Plan
    tower: Path
    folder: Path
    threads: int
    memory_cap: int = 0
    running: dict[str, Child] = field(default_factory=dict)
    _largest: dict[str, int] = field(default_factory=dict)
    _specs: dict[Path, EngineSpec | None] = field(default_factory=dict)

    def files_of(self, contender: Contender, workload: Workload) -> Path:
        return self.folder / "files" / contender.folder_name(workload)

    def build(self, contender: Contender, workload: Workload) -> float:
        """Write the contender's files unless they are there; return the seconds."""
        files = self.files_of(contender, workload)
        if contender.kind in ("eager", "compiled") or files.is_dir():
            return 0.0
        self.drop(contender)
        answer = self._send(contender, workload, self.plan.build_seconds, "build", workload.grids)
        seconds, self._specs[files] = answer
        if self.plan.build_apart:
            self.drop(contender)
        return float(seconds)

    def take(self, contender: Contender, workload: Workload, output: Path | None = None) -> Numbers:
        """Make a contender ready for a workload: open it if it is closed, run it once."""
        running = self.running.get(contender.name)
        if contender.kind == "exporter" and running and running.ready not in ("", workload.name):
            self.drop(contender)  # its program is for one workload
        given = (workload.grids, output, self._specs.get(self.files_of(contender, workload)))
        found = self._send(contender, workload, self.plan.prepare_seconds, "take", *given)
        self.running[contender.name].ready = workload.name
        return self._measured(contender, found)

    def sample(self, contender: Contender, workload: Workload) -> Numbers:
        """Return seconds and memory of a run; a contender that had made room is opened and warmed first."""
        running = self.running.get(contender.name)
        if running is None or running.ready != workload.name:
            self.take(contender, workload)
        time.sleep(SETTLE_S)
        found = self._send(contender, workload, self.plan.sample_seconds, "sample")
        return self._measured(contender, found)

    def count(self, small: Sequence[Grid], calls: Sequence[Sequence[Grid]]) -> Any:
        """Count the operations of calls in a process of their own."""
        counter, workload = Contender(name="count", kind="eager"), self.plan.workloads[0]
        try:
            return self._send(counter, workload, self.plan.build_seconds, "count", small, calls)
        finally:
            self.drop(counter)

    def _send(
        self, contender: Contender, workload: Workload, seconds: float, verb: str, *given: object
    ) -> Any:
        """Use the contender's process, or a new one that the oldest ones make room for; a failure ends it."""
        # A contender that has not run yet may become as large as the largest that has.
        wanted = self._largest.get(contender.name, max(self._largest.values(), default=0))
        child, others = self.running.pop(contender.name, None), self.running
        while others and 0 < self.memory_cap < wanted + sum(each.held() for each in others.values()):
            others.pop(next(iter(others))).close()
        self.running[contender.name] = child = child or self._start(contender, workload)
        try:
            return child.send(seconds, verb, *given)
        except Failure:
            self.drop(contender)
            raise

    def _start(self, contender: Contender, workload: Workload) -> Child:
        job = Job(
            contender=contender,
            tower=self.tower,
            folder=self.files_of(contender, workload),
            threads=self.threads,
            gemm=self.plan.gemm,
            seed=self.plan.seed,
        )
        environment = {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads)),
            # Threads sleep while they wait.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "ORT_DISABLE_TELEMETRY": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }
        return Child(job, environment, self.memory_cap)

    def _measured(self, contender: Contender, found: Numbers) -> Numbers:
        self._largest[contender.name] = max(int(found["peak"]), self._largest.get(contender.name, 0))
        return found

    def drop(self, contender: Contender) -> None:
        child = self.running.pop(contender.name, None)
        if child is not None:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.running:
            self.running.popitem()[1].close()
