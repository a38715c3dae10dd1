"""A run from its plan to its stored result: everybody checked, then timed in interleaved rounds."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from torch import Tensor

import vlexport
from benchmarks import memory
from benchmarks.answers import measure_all
from benchmarks.plans import BASELINE, TWIN, Contender, Plan, Question, Workload, contenders
from benchmarks.pool import Failure, Pool
from benchmarks.results import Cell, Entry, Result, Round, read_result
from benchmarks.sources import source_digest
from benchmarks.towers import default_recipe, write_tower
from benchmarks.worker import Numbers
from vlexport.backends import capability_of, find_backend
from vlexport.errors import RequestError, VlexportError
from vlexport.evaluate.bench import order_of
from vlexport.parity.metrics import Metrics, compare
from vlexport.parity.noise import MOST_RAISED, cap_of
from vlexport.recipe import recipe_folder
from vlexport.target import processor_here

Progress = Callable[[str], None]

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

    def is_left(self, each: Workload | Question, stored: Mapping[str, object]) -> bool:
        return each.name not in stored and (not self.only or each.name in self.only)


def run(options: RunOptions, progress: Progress) -> Result:
    """Measure what is not stored yet; interrupted, it keeps the cells that were done."""
    plan, recipe = options.plan, options.recipe or default_recipe()
    result = _stored(options, recipe)
    workloads = [each for each in plan.workloads if options.is_left(each, result.cells)]
    questions = [each for each in plan.questions if options.is_left(each, result.questions)]
    with tempfile.TemporaryDirectory(prefix="vlexport-bench-") as name:
        if workloads:
            progress("tower")
            with Pool(
                plan=plan,
                tower=write_tower(Path(name) / "tower", recipe, plan.size, seed=plan.seed),
                folder=Path(name),
                threads=options.threads,
                memory_cap=int(MEMORY_SHARE * memory.available()),
            ) as pool:
                _measure(pool, workloads, result, options.out, progress)
        if questions:
            progress("questions")
            for cell in measure_all(plan, recipe, questions, Path(name), options.threads):
                result.questions[cell.question] = cell
            result.save(options.out)
    return result


def _measure(
    pool: Pool, workloads: Sequence[Workload], result: Result, out: Path, progress: Progress
) -> None:
    plan, started = pool.plan, time.monotonic()
    everybody = contenders(plan)
    progress("count operations")
    try:
        counted = pool.count(plan.workloads[0].grids, [workload.grids for workload in workloads])
    except Failure as failure:
        raise VlexportError(f"the operations of the workloads could not be counted: {failure}") from None
    too_slow: dict[str, str] = {}
    for index, workload in enumerate(workloads):
        field = Field(pool, workload, everybody, too_slow, progress)
        # The cell's share of the time that is left, by rows to compute.
        later = sum(each.patches * each.rounds for each in workloads[index:])
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
            rounds=field.run_rounds(seconds),
            entries=field.entries,
        )
        result.save(out)
        for contender in everybody:
            # Programs that hold one shape are of no use to the next cell, and as large as the tower.
            if contender.kind == "exporter":
                pool.drop(contender)
                shutil.rmtree(pool.files_of(contender, workload), ignore_errors=True)


class Field:
    """The contenders of a cell, each built, opened, run once and compared with the baseline, the first."""

    def __init__(
        self,
        pool: Pool,
        workload: Workload,
        everybody: Sequence[Contender],
        too_slow: dict[str, str],
        progress: Progress,
    ) -> None:
        self._pool, self._workload, self._too_slow, self._progress = pool, workload, too_slow, progress
        self._everybody = {each.name: each for each in everybody}
        self._baseline: Tensor | None = None
        self.entries: dict[str, Entry] = {}
        for contender in everybody:
            progress(f"{workload.name}: {contender.name}")
            entry = Entry(status="timed", kind=contender.kind, dtype=contender.quantise or contender.dtype)
            reason = contender.refuses(pool.plan, workload) or too_slow.get(contender.name, "")
            self.entries[contender.name] = (
                replace(entry, status="skipped", reason=reason) if reason else self._ready(contender, entry)
            )

    def _ready(self, contender: Contender, entry: Entry) -> Entry:
        output = self._pool.folder / "output.safetensors"
        try:
            built = self._pool.build(contender, self._workload)
        except Failure as failure:
            return self._failed(contender, entry, failure, "build: ")
        try:
            taken = self._pool.take(contender, self._workload, output)
        except Failure as failure:
            return self._failed(contender, entry, failure)
        entry = replace(entry, build_seconds=built, first_seconds=taken["first_seconds"])
        return entry if contender.kind == "product" else self._compared(contender, entry, output)

    def _failed(self, contender: Contender, entry: Entry, failure: Failure, during: str = "") -> Entry:
        if failure.too_slow:
            # It would be again, so it is not tried on later workloads.
            self._too_slow[contender.name] = f"ran out of time at '{self._workload.name}'"
        return replace(entry, status="failed", reason=f"{during}{failure.reason}")

    def _compared(self, contender: Contender, entry: Entry, output: Path) -> Entry:
        """Return the entry with its errors against the baseline, out of the race if they are too large."""
        from safetensors.torch import load_file

        # A copy: the next contender writes the same file.
        tokens = load_file(output)["tokens"].clone()
        if contender.name == BASELINE:
            self._baseline = tokens
            return entry
        reason = f"nothing to compare with: {BASELINE} gave no tokens"
        if self._baseline is not None:
            found = compare(tokens, self._baseline)
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
        if contender.quantise:
            able = capability_of(find_backend(contender.library), contender.dtype, contender.quantise)
            assert able is not None
            assert able.quantisation is not None
            most = MOST_RAISED * cap_of(able.quantisation).relative_l2
            fine = measured.relative_l2 <= most
            return "" if fine else f"relative L2 {measured.relative_l2:.1e}, {most:.1e} allowed"
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

    def run_rounds(self, seconds: float) -> list[Round]:
        """Time those that are ready, as many rounds as the workload wants and the time allows."""
        plan, started = self._pool.plan, time.monotonic()
        rounds: list[Round] = []
        for index in range(self._workload.rounds):
            if index >= plan.least_rounds and time.monotonic() - started > seconds:
                break
            self._progress(f"{self._workload.name}: round {index + 1}")
            names = [name for name, entry in self.entries.items() if entry.status == "timed"]
            order, before = with_twins(names, index, plan.seed), memory.steal()
            taken = self._sampled(order)
            twins = [
                [one["seconds"], other["seconds"]]
                for name in taken
                for one, other in zip(taken[name], taken.get(f"{name}{TWIN}", []), strict=False)
            ]
            circumstances = {"load": os.getloadavg()[0], "stolen_seconds": memory.steal() - before}
            rounds.append(Round(order=order, twins=twins, **circumstances))
        return rounds

    def _sampled(self, order: Sequence[str]) -> dict[str, list[Numbers]]:
        """Sample everybody in this order and store the round; return the samples of those that gave all."""
        taken: dict[str, list[Numbers]] = {name: [] for name in order}
        for name in order:
            contender, entry = self._everybody[name], self.entries[name]
            if entry.status == "timed":
                try:
                    taken[name].append(self._pool.sample(contender, self._workload))
                except Failure as failure:
                    self.entries[name] = self._failed(contender, entry, failure)
        found = {name: taken[name] for name in taken if self.entries[name].status == "timed"}
        for name, numbers in found.items():
            entry = self.entries[name]
            self.entries[name] = replace(
                entry,
                seconds=[*entry.seconds, statistics.fmean(each["seconds"] for each in numbers)],
                base_bytes=[*entry.base_bytes, numbers[-1]["base"]],
                peak_bytes=[*entry.peak_bytes, max(each["peak"] for each in numbers)],
            )
        return found


def with_twins(names: Sequence[str], index: int, seed: int) -> list[str]:
    """Return the order of a round: an original and its twin are one after the other, there and back."""
    order = order_of([name for name in names if not name.endswith(TWIN)], index, seed)
    for twin in (name for name in names if name.endswith(TWIN)):
        original = twin.removesuffix(TWIN)
        if original in order:
            pair = [original, twin][:: -1 if index % 2 else 1]
            at = order.index(original)
            order[at : at + 1] = [*pair, *reversed(pair)]
    return order


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
    return Result(plan=asdict(options.plan), key=key, machine=machine, cells={})


def describe_machine(threads: int) -> dict[str, object]:
    installed = {each.name.lower(): each.version for each in distributions()}
    return {
        "processor": processor_here(),
        "processors": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": threads,
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
    }
