"""Contenders' processes: one computes, the others are stopped, all of them stay below one memory cap."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from vlexport.bench import memory
from vlexport.bench.contenders import Contender
from vlexport.bench.models import Grid
from vlexport.bench.plans import Plan, Workload

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why there is no answer."""

    reason: str
    too_slow: bool = False


Answer = Mapping[str, float] | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What all contenders of a run share; `memory_cap` in bytes, 0 for none."""

    plan: Plan
    tower: Path
    folder: Path
    threads: int
    memory_cap: int

    def command(self, contender: Contender, workload: Workload) -> list[str]:
        given = {
            "contender": contender.to_json(),
            "tower": str(self.tower),
            "folder": str(self.files_of(contender, workload)),
            "threads": self.threads,
            "gemm": self.plan.gemm,
            "seed": self.plan.seed,
        }
        return [sys.executable, "-m", "vlexport.bench.child", json.dumps(given)]

    def files_of(self, contender: Contender, workload: Workload) -> Path:
        return self.folder / "files" / contender.folder_name(workload)

    def environment(self) -> dict[str, str]:
        """Threads that wait without computing, caches that go with the folder, and no reports to makers."""
        threads = str(self.threads)
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "ORT_DISABLE_TELEMETRY": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }


class Child:
    """One contender's process, stopped except while it answers."""

    def __init__(self, stage: Stage, contender: Contender, workload: Workload) -> None:
        self._stage = stage
        self._log = stage.folder / "logs" / f"{contender.folder_name(workload)}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                stage.command(contender, workload),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=stage.environment(),
                start_new_session=True,
            )

    def ask(self, request: Mapping[str, object], seconds: float) -> Answer:
        """The answer, or why it did not come: an error, too late, too large, gone."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._gone()
        line = self._wait(time.monotonic() + seconds)
        if isinstance(line, Failure):
            self.close()
            return line
        self._stop()
        found = json.loads(line)
        return Failure(reason=str(found["error"])) if "error" in found else found

    def _wait(self, deadline: float) -> bytes | Failure:
        assert self._process.stdout is not None
        cap = self._stage.memory_cap
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(LOOK_EVERY_S):
                if cap and self.resident() > cap:
                    return Failure(reason=f"more than the cap of {cap / 2**30:.1f} GiB of memory")
                if time.monotonic() > deadline:
                    return Failure(reason="more than the time allowed", too_slow=True)
        line = self._process.stdout.readline()
        return line or self._gone()

    def _gone(self) -> Failure:
        code = self._process.wait()
        tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return Failure(reason=f"the process ended with {code}: {' '.join(tail)[:200]}")

    def resident(self) -> int:
        return memory.resident(self._process.pid)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _stop(self) -> None:
        """Come back once it stands still, or is gone; the next contender may compute from then on."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        """End the process and everything that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Pool:
    """Children by contender; the one used longest ago makes room for the next."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._running: dict[str, Child] = {}
        self._ready: dict[str, str] = {}
        self._largest: dict[str, int] = {}
        self._too_slow: dict[str, str] = {}

    def build(self, contender: Contender, workload: Workload) -> Answer:
        """Write the contender's files; nothing to do where they lie already."""
        if not contender.needs_build() or self.stage.files_of(contender, workload).is_dir():
            return {"seconds": 0.0}
        self.drop(contender)
        self._make_room(contender.name)
        self._running[contender.name] = child = Child(self.stage, contender, workload)
        request = {"do": "build", "grids": workload.grids}
        answer = child.ask(request, self.stage.plan.build_seconds)
        if self.stage.plan.build_apart or isinstance(answer, Failure):
            self.drop(contender)
        self._remember_slow(contender, workload, answer)
        return answer

    def too_slow(self, contender: Contender) -> str:
        """Where it ran out of time before, as it would again; empty if it never did."""
        return self._too_slow.get(contender.name, "")

    def _remember_slow(self, contender: Contender, workload: Workload, answer: Answer) -> None:
        if isinstance(answer, Failure) and answer.too_slow:
            self._too_slow[contender.name] = f"ran out of time at '{workload.name}'"

    def take(self, contender: Contender, workload: Workload, output: str = "") -> Answer:
        """Make a contender ready for a workload: open it if it is closed, run it twice."""
        if contender.kind == "exporter" and self._ready.get(contender.name, workload.name) != workload.name:
            self.drop(contender)  # its program is for one workload
        self._make_room(contender.name)
        child = self._running.pop(contender.name, None) or Child(self.stage, contender, workload)
        self._running[contender.name] = child
        request = {"do": "take", "grids": workload.grids, "output": output}
        answer = self._kept(contender, child.ask(request, self.stage.plan.prepare_seconds))
        self._ready[contender.name] = workload.name
        self._remember_slow(contender, workload, answer)
        return answer

    def sample(self, contender: Contender, workload: Workload) -> Answer:
        """Seconds of one run; a contender that had to make room is opened and warmed first."""
        if self._ready.get(contender.name) != workload.name or contender.name not in self._running:
            answer = self.take(contender, workload)
            if isinstance(answer, Failure):
                return answer
        self._make_room(contender.name)
        child = self._running.pop(contender.name)
        self._running[contender.name] = child
        return self._kept(contender, child.ask({"do": "sample"}, self.stage.plan.sample_seconds))

    def count(self, small: Sequence[Grid], calls: Sequence[Sequence[Grid]]) -> Answer:
        """Operations of calls, counted in a process of their own."""
        nobody = Contender(name="count", kind="eager")
        child = Child(self.stage, nobody, self.stage.plan.workloads[0])
        try:
            request = {"do": "count", "small": small, "calls": calls}
            return child.ask(request, self.stage.plan.build_seconds)
        finally:
            child.close()

    def _kept(self, contender: Contender, answer: Answer) -> Answer:
        if isinstance(answer, Failure):
            self.drop(contender)
        else:
            self._largest[contender.name] = max(int(answer["most"]), self._largest.get(contender.name, 0))
        return answer

    def _make_room(self, name: str) -> None:
        cap = self.stage.memory_cap
        # A contender that has not run yet may become as large as the largest that has.
        wanted = self._largest.get(name, max(self._largest.values(), default=0))
        while cap and self._idle(name) + wanted > cap:
            oldest = next((other for other in self._running if other != name), None)
            if oldest is None:
                return
            self._running.pop(oldest).close()

    def _idle(self, name: str) -> int:
        return sum(child.resident() for other, child in self._running.items() if other != name)

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
