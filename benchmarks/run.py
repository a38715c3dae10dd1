"""A run from its plan to its stored result: everybody checked, then timed in interleaved rounds."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import vlexport
from benchmarks import memory
from benchmarks.answers import ask_all
from benchmarks.contenders import BASELINE, Contender, contenders
from benchmarks.plans import Plan, Question, Workload
from benchmarks.pool import Pool, Stage
from benchmarks.results import Cell, Entry, Result, Round, read_result
from benchmarks.towers import default_recipe, write_tower
from benchmarks.worker import Failure
from vlexport.bench import order_of
from vlexport.bundle import source_digest
from vlexport.errors import RequestError, VlexportError
from vlexport.parity.metrics import Metrics, compare
from vlexport.recipe import recipe_folder

Progress = Callable[[str, float], None]

# Of what is free when the run starts; the rest is for this process, the page cache and surprises.
MEMORY_SHARE = 0.75
PACKAGES = ("torch", "transformers", "onnxruntime-gpu", "onnxruntime", "openvino", "onnx", "onnxscript")
# performance.md, benchmark design: a time counts from this cosine on, token by token.
LEAST_COSINE = 0.9999
# A reduced dtype may stray as far as the reference does in it, and half as much again.
HALF_SLACK = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """A plan and how to run it; `only` are names of workloads and questions, none means all."""

    plan: Plan
    out: Path
    recipe: str = ""
    threads: int = 2
    fresh: bool = False
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        workloads, questions = self.plan.workloads, self.plan.questions
        known = sorted({*(each.name for each in workloads), *(each.name for each in questions)})
        unknown = sorted(set(self.only) - set(known))
        if unknown:
            raise RequestError(
                f"no workload {', '.join(map(repr, unknown))} in plan '{self.plan.name}'. "
                f"Known: {', '.join(map(repr, known))}."
            )

    def is_wanted(self, each: Workload | Question) -> bool:
        return not self.only or each.name in self.only


def run(options: RunOptions, progress: Progress) -> Result:
    """Measure what is not stored yet; interrupted, it keeps the cells that were done."""
    plan, recipe = options.plan, options.recipe or default_recipe()
    result = _stored(options, recipe)
    wanted = filter(options.is_wanted, plan.workloads)
    left = [workload for workload in wanted if workload.name not in result.cells]
    with tempfile.TemporaryDirectory(prefix="vlexport-bench-") as name:
        if left:
            progress("tower", 0.0)
            stage = Stage(
                plan=plan,
                tower=write_tower(Path(name) / "tower", recipe, plan.size, seed=plan.seed),
                folder=Path(name),
                threads=options.threads,
                memory_cap=int(MEMORY_SHARE * memory.available()),
            )
            with Pool(stage) as pool:
                _measure(pool, left, result, options.out, progress)
        asked = [each for each in plan.questions if options.is_wanted(each)]
        unasked = [question for question in asked if question.name not in result.questions]
        if unasked:
            progress("questions", 0.0)
            for cell in ask_all(plan, recipe, unasked, Path(name), options.threads):
                result.questions[cell.question] = cell
            result.save(options.out)
    return result


def _measure(pool: Pool, left: Sequence[Workload], result: Result, out: Path, progress: Progress) -> None:
    plan, started = pool.stage.plan, time.monotonic()
    everybody = contenders(plan)
    progress("count operations", 0.0)
    counted = pool.count(plan.workloads[0].grids, [workload.grids for workload in left])
    if isinstance(counted, Failure):
        raise VlexportError(f"the operations of the workloads could not be counted: {counted.reason}")
    for index, workload in enumerate(left):
        field = Field(pool, workload, everybody)
        field.make_ready(progress)
        # The cell's share of the time that is left, by rows to compute.
        later = sum(each.patches * each.rounds for each in left[index:])
        share = workload.patches * workload.rounds / later
        seconds = share * max(0.0, plan.seconds - (time.monotonic() - started))
        operations, scores = counted[index]
        result.cells[workload.name] = Cell(
            workload=workload.name,
            series=workload.series,
            grids=[list(grid) for grid in workload.grids],
            patches=workload.patches,
            operations=operations,
            scores=scores,
            product_operations=2.0 * plan.gemm[0] * plan.gemm[1] * plan.gemm[2],
            rounds=field.run_rounds(seconds, progress),
            entries=field.entries,
        )
        result.save(out)
        for contender in everybody:
            # Programs that hold one shape are of no use to the next cell, and as large as the tower.
            if contender.kind == "exporter":
                pool.drop(contender)
                shutil.rmtree(pool.stage.files_of(contender, workload), ignore_errors=True)


class Field:
    """The contenders of a cell, with what is known of each."""

    def __init__(self, pool: Pool, workload: Workload, everybody: Sequence[Contender]) -> None:
        self._pool = pool
        self._workload = workload
        self._everybody = everybody
        self._outputs = pool.stage.folder / "outputs"
        self.entries: dict[str, Entry] = {}

    def make_ready(self, progress: Progress) -> None:
        """Build, open, run twice and compare with the baseline, which comes first."""
        self._outputs.mkdir(parents=True, exist_ok=True)
        for index, contender in enumerate(self._everybody):
            progress(f"{self._workload.name}: {contender.name}", index / len(self._everybody))
            entry = Entry(status="timed", kind=contender.kind, dtype=contender.dtype)
            self.entries[contender.name] = self._readied(contender, entry)

    def _readied(self, contender: Contender, entry: Entry) -> Entry:
        pool, workload = self._pool, self._workload
        reason = contender.refuses(pool.stage.plan, workload) or pool.too_slow(contender)
        if reason:
            return replace(entry, status="skipped", reason=reason)
        built = pool.build(contender, workload)
        if isinstance(built, Failure):
            return replace(entry, status="failed", reason=f"build: {built.reason}")
        taken = pool.take(contender, workload, self._output(contender))
        if isinstance(taken, Failure):
            return replace(entry, status="failed", reason=taken.reason)
        entry = replace(
            entry,
            build_seconds=built,
            first_seconds=taken["first_seconds"],
            base_bytes=taken["base"],
            peak_bytes=taken["peak"],
        )
        return entry if contender.kind == "product" else self._gated(contender, entry)

    def _output(self, contender: Contender) -> Path:
        return self._outputs / f"{self._everybody.index(contender)}.safetensors"

    def _gated(self, contender: Contender, entry: Entry) -> Entry:
        """Return the entry with its errors against the baseline, out of the race if they are too large."""
        from safetensors.torch import load_file

        if contender.name == BASELINE:
            return entry
        baseline = self._output(next(one for one in self._everybody if one.name == BASELINE))
        reason = f"nothing to compare with: {BASELINE} gave no tokens"
        if baseline.is_file():
            found = compare(load_file(self._output(contender))["tokens"], load_file(baseline)["tokens"])
            if isinstance(found, Metrics):
                errors = ("relative_l2", "worst_token", "min_cosine")
                entry = replace(entry, **{name: getattr(found, name) for name in errors})
            reason = self._gate(contender, found) if isinstance(found, Metrics) else found.reason
        if reason:
            self._pool.drop(contender)
            return replace(entry, status="wrong", reason=reason)
        return entry

    def _gate(self, contender: Contender, measured: Metrics) -> str:
        """Return why the tokens are wrong; empty if they are right."""
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
        """Time those that are ready, as many rounds as the workload wants and the time allows."""
        plan, started = self._pool.stage.plan, time.monotonic()
        rounds: list[Round] = []
        for index in range(self._workload.rounds):
            if index >= plan.least_rounds and time.monotonic() - started > seconds:
                break
            names = [name for name, entry in self.entries.items() if entry.status == "timed"]
            progress(f"{self._workload.name}: round {index + 1}", index / self._workload.rounds)
            rounds.append(self._round(order_of(names, index, plan.seed)))
        shutil.rmtree(self._outputs)
        return rounds

    def _round(self, order: list[str]) -> Round:
        by_name = {one.name: one for one in self._everybody}
        before = memory.steal()
        for name in order:
            answer, entry = self._pool.sample(by_name[name], self._workload), self.entries[name]
            if isinstance(answer, Failure):
                self.entries[name] = replace(entry, status="failed", reason=answer.reason)
            else:
                self.entries[name] = replace(entry, seconds=[*entry.seconds, answer["seconds"]])
        return Round(order=order, load=os.getloadavg()[0], stolen_seconds=memory.steal() - before)


def _stored(options: RunOptions, recipe: str) -> Result:
    """Return the cells of the same plan, sources and machine; anything else is measured anew."""
    machine = describe_machine(options.threads)
    sources = source_digest(Path(vlexport.__file__).parent, recipe_folder())
    parts = (options.plan.digest(), recipe, sources, str(sorted(machine.items())))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if options.out.is_file() and not options.fresh:
        found = read_result(options.out)
        if found.key == key:
            return found
    return Result(plan=options.plan.to_json(), key=key, machine=machine, cells={})


def describe_machine(threads: int) -> dict[str, object]:
    """Return processor, memory and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": model or platform.processor(),
        "processors": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": threads,
        "versions": versions,
    }
