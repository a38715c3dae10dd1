"""One workload: everybody is made ready and checked, then timed in interleaved rounds."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vlexport.bench import memory
from vlexport.bench.children import Failure, Pool
from vlexport.bench.contenders import BASELINE, Contender
from vlexport.bench.plans import Workload
from vlexport.bench.results import Entry, Round
from vlexport.parity.metrics import Incomparable, Metrics, compare

Progress = Callable[[str, float], None]

# performance.md, benchmark design: a time counts from this cosine on, token by token.
LEAST_COSINE = 0.9999
# A reduced dtype may stray as far as the reference does in it, and half as much again.
HALF_SLACK = 1.5


class Field:
    """The contenders of a cell, with what is known of each."""

    def __init__(self, pool: Pool, workload: Workload, everybody: Sequence[Contender]) -> None:
        self._pool = pool
        self._workload = workload
        self._everybody = everybody
        self._outputs = pool.stage.folder / "outputs"
        self.entries: dict[str, Entry] = {}

    def make_ready(self, progress: Progress) -> None:
        """Build, open, run twice and hold against the baseline; the baseline comes first."""
        self._outputs.mkdir(parents=True, exist_ok=True)
        for index, contender in enumerate(self._everybody):
            progress(f"{self._workload.name}: {contender.name}", index / len(self._everybody))
            self.entries[contender.name] = self._readied(contender)

    def _readied(self, contender: Contender) -> Entry:
        entry = Entry(status="timed", kind=contender.kind, dtype=contender.dtype)
        reason = contender.refuses(self._pool.stage.plan, self._workload) or self._pool.too_slow(contender)
        if reason:
            return replace(entry, status="skipped", reason=reason)
        built = self._pool.build(contender, self._workload)
        if isinstance(built, Failure):
            return replace(entry, status="failed", reason=f"build: {built.reason}")
        output = self._output(contender)
        taken = self._pool.take(contender, self._workload, str(output) if self._is_checked(contender) else "")
        if isinstance(taken, Failure):
            return replace(entry, status="failed", reason=taken.reason)
        entry = replace(
            entry,
            build_seconds=built["seconds"],
            first_seconds=taken["first_seconds"],
            base_bytes=taken["base"],
            peak_bytes=taken["peak"],
        )
        return self._gated(contender, entry) if self._is_checked(contender) else entry

    def _is_checked(self, contender: Contender) -> bool:
        return contender.kind != "product"

    def _output(self, contender: Contender) -> Path:
        return self._outputs / f"{self._everybody.index(contender)}.safetensors"

    def _gated(self, contender: Contender, entry: Entry) -> Entry:
        """With the errors against the baseline, and out of the race if they are too large."""
        if contender.name == BASELINE:
            return entry
        measured = self._compared(contender)
        if not isinstance(measured, Metrics):
            self._pool.drop(contender)
            return replace(entry, status="wrong", reason=measured)
        entry = replace(
            entry,
            relative_l2=measured.relative_l2,
            worst_token=measured.worst_token,
            min_cosine=measured.min_cosine,
        )
        reason = self._gate(contender, measured)
        if not reason:
            return entry
        self._pool.drop(contender)
        return replace(entry, status="wrong", reason=reason)

    def _compared(self, contender: Contender) -> Metrics | str:
        from safetensors.torch import load_file

        baseline = self._output(next(one for one in self._everybody if one.name == BASELINE))
        if not baseline.is_file():
            return f"nothing to compare with: {BASELINE} gave no tokens"
        found = compare(load_file(self._output(contender))["tokens"], load_file(baseline)["tokens"])
        return found.reason if isinstance(found, Incomparable) else found

    def _gate(self, contender: Contender, measured: Metrics) -> str:
        """Why the tokens are wrong; empty if they are right."""
        if contender.dtype == "float32":
            fine = measured.min_cosine >= LEAST_COSINE
            return "" if fine else f"wrong tokens, no error raised: relative L2 {measured.relative_l2:.1e}"
        if contender.kind == "eager":
            return ""
        own = self.entries[f"Hugging Face eager {contender.dtype}"].relative_l2
        if own is None:
            return f"nothing to compare with: the reference gave no tokens in {contender.dtype}"
        fine = measured.relative_l2 <= HALF_SLACK * own
        return "" if fine else f"relative L2 {measured.relative_l2:.1e}, {HALF_SLACK} x {own:.1e} allowed"

    def run_rounds(self, seconds: float, progress: Progress) -> list[Round]:
        """Time those that are ready, as many rounds as the workload asks for and the time allows."""
        plan, started = self._pool.stage.plan, time.monotonic()
        rounds: list[Round] = []
        for index in range(self._workload.rounds):
            if index >= plan.least_rounds and time.monotonic() - started > seconds:
                break
            names = [name for name, entry in self.entries.items() if entry.status == "timed"]
            progress(f"{self._workload.name}: round {index + 1}", index / self._workload.rounds)
            rounds.append(self._round(order_of(names, index, plan.seed)))
        for path in self._outputs.iterdir():
            path.unlink()
        return rounds

    def _round(self, order: list[str]) -> Round:
        by_name: Mapping[str, Contender] = {one.name: one for one in self._everybody}
        before = memory.steal()
        for name in order:
            answer = self._pool.sample(by_name[name], self._workload)
            entry = self.entries[name]
            if isinstance(answer, Failure):
                self.entries[name] = replace(entry, status="failed", reason=answer.reason)
            else:
                self.entries[name] = replace(entry, seconds=[*entry.seconds, answer["seconds"]])
        stolen = memory.steal() - before
        return Round(order=order, load=os.getloadavg()[0], stolen_seconds=stolen)


def order_of(names: Sequence[str], index: int, seed: int) -> list[str]:
    """A random order for every even round; odd rounds go back the way the one before came."""
    order = list(names)
    random.Random(f"{seed}/{index // 2}").shuffle(order)
    return order if index % 2 == 0 else order[::-1]
