"""The processes of the contenders: one computes while the others wait, all of them below one memory cap."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import memory
from benchmarks.contenders import Contender
from benchmarks.plans import Plan, Workload
from benchmarks.towers import Grid
from benchmarks.worker import Failure, Job, serve
from vlexport.backends import EngineSpec
from vlexport.bench import SETTLE_S

LOOK_EVERY_S = 0.2
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What all contenders of a run share; `memory_cap` in bytes, 0 for none."""

    plan: Plan
    tower: Path
    folder: Path
    threads: int
    memory_cap: int

    def files_of(self, contender: Contender, workload: Workload) -> Path:
        return self.folder / "files" / contender.folder_name(workload)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Set what processes inherit: threads that sleep while they wait, caches that go with the folder."""
        before, threads = dict(os.environ), str(self.threads)
        os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        os.environ |= {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class Child:
    """One contender's process. It ends when the pipe closes."""

    def __init__(self, stage: Stage, contender: Contender, workload: Workload) -> None:
        self._cap = stage.memory_cap
        self._pipe, other = SPAWN.Pipe()
        job = Job(
            contender=contender,
            tower=stage.tower,
            folder=stage.files_of(contender, workload),
            threads=stage.threads,
            gemm=stage.plan.gemm,
            seed=stage.plan.seed,
        )
        self._process = SPAWN.Process(target=serve, args=(other, job), daemon=True)
        with stage.environment():
            self._process.start()
        other.close()

    def ask(self, seconds: float, verb: str, *given: object) -> Any:
        """Return the answer, or the failure: an error, too late, too large, gone."""
        deadline = time.monotonic() + seconds
        try:
            self._pipe.send((verb, given))
            while not self._pipe.poll(LOOK_EVERY_S):
                if self._cap and self.resident() > self._cap:
                    self.close()
                    return Failure(reason=f"more than the cap of {self._cap / 2**30:.1f} GiB of memory")
                if time.monotonic() > deadline:
                    self.close()
                    return Failure(reason="more than the time allowed", too_slow=True)
            return self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            return Failure(reason=f"the process ended with {self._process.exitcode}")

    def resident(self) -> int:
        return memory.resident(self._process.pid or 0)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Pool:
    """Children by contender; the one used longest ago makes room for the next."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._running: dict[str, Child] = {}
        self._ready: dict[str, str] = {}
        self._largest: dict[str, int] = {}
        self._too_slow: dict[str, str] = {}
        self._specs: dict[Path, EngineSpec | None] = {}

    def build(self, contender: Contender, workload: Workload) -> float | Failure:
        """Write the contender's files unless they are there; return the seconds."""
        files = self.stage.files_of(contender, workload)
        if not contender.needs_build() or files.is_dir():
            return 0.0
        self.drop(contender)
        answer = self._child(contender, workload).ask(self.stage.plan.build_seconds, "build", workload.grids)
        if self.stage.plan.build_apart or isinstance(answer, Failure):
            self.drop(contender)
        if isinstance(answer, Failure):
            return self._remembered(contender, workload, answer)
        seconds, self._specs[files] = answer
        return float(seconds)

    def too_slow(self, contender: Contender) -> str:
        """Return where it ran out of time before, as it would again; empty if it never did."""
        return self._too_slow.get(contender.name, "")

    def _remembered(self, contender: Contender, workload: Workload, failure: Failure) -> Failure:
        if failure.too_slow:
            self._too_slow[contender.name] = f"ran out of time at '{workload.name}'"
        return failure

    def take(
        self, contender: Contender, workload: Workload, output: Path | None = None
    ) -> dict[str, float] | Failure:
        """Make a contender ready for a workload: open it if it is closed, run it twice."""
        if contender.kind == "exporter" and self._ready.get(contender.name, workload.name) != workload.name:
            self.drop(contender)  # its program is for one workload
        spec = self._specs.get(self.stage.files_of(contender, workload))
        seconds, child = self.stage.plan.prepare_seconds, self._child(contender, workload)
        answer = self._kept(contender, child.ask(seconds, "take", workload.grids, output, spec))
        self._ready[contender.name] = workload.name
        return self._remembered(contender, workload, answer) if isinstance(answer, Failure) else answer

    def sample(self, contender: Contender, workload: Workload) -> dict[str, float] | Failure:
        """Time one run; a contender that had to make room is opened and warmed first."""
        if self._ready.get(contender.name) != workload.name or contender.name not in self._running:
            answer = self.take(contender, workload)
            if isinstance(answer, Failure):
                return answer
        time.sleep(SETTLE_S)
        child = self._child(contender, workload)
        return self._kept(contender, child.ask(self.stage.plan.sample_seconds, "sample"))

    def count(self, small: Sequence[Grid], calls: Sequence[Sequence[Grid]]) -> Any:
        """Count the operations of calls in a process of their own."""
        child = Child(self.stage, Contender(name="count", kind="eager"), self.stage.plan.workloads[0])
        try:
            return child.ask(self.stage.plan.build_seconds, "count", small, calls)
        finally:
            child.close()

    def _child(self, contender: Contender, workload: Workload) -> Child:
        """Return the running process of a contender, or a new one that the oldest ones make room for."""
        # A contender that has not run yet may become as large as the largest that has.
        wanted = self._largest.get(contender.name, max(self._largest.values(), default=0))
        child = self._running.pop(contender.name, None)
        cap = self.stage.memory_cap
        while (
            cap and self._running and sum(each.resident() for each in self._running.values()) + wanted > cap
        ):
            self._running.pop(next(iter(self._running))).close()
        self._running[contender.name] = child = child or Child(self.stage, contender, workload)
        return child

    def _kept(self, contender: Contender, answer: Any) -> dict[str, float] | Failure:
        if isinstance(answer, Failure):
            self.drop(contender)
            return answer
        found: dict[str, float] = answer
        self._largest[contender.name] = max(int(found["most"]), self._largest.get(contender.name, 0))
        return found

    def drop(self, contender: Contender) -> None:
        """End a contender's process, if it runs."""
        child = self._running.pop(contender.name, None)
        self._ready.pop(contender.name, None)
        if child is not None:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._running.values():
            child.close()
        self._running.clear()
