"""A run from its plan to its stored result: the tower, then cell by cell, each stored as it is done."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vlexport.bench import memory
from vlexport.bench.cells import Field, Progress
from vlexport.bench.children import Failure, Pool, Stage
from vlexport.bench.clock import Clock
from vlexport.bench.contenders import Contender, contenders
from vlexport.bench.models import contents_of, default_recipe, write_tower
from vlexport.bench.plans import Plan, Question, Workload
from vlexport.bench.questions import ask_all
from vlexport.bench.results import Cell, Result, read_result
from vlexport.bundle import source_digest
from vlexport.errors import RequestError, VlexportError
from vlexport.recipe import recipe_folder

# Of what is free when the run starts; the rest is for this process, the page cache and surprises.
MEMORY_SHARE = 0.75
PACKAGES = ("torch", "transformers", "onnxruntime-gpu", "onnxruntime", "openvino", "onnx", "onnxscript")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A run as it was asked for; `only` are names of workloads and questions, none means all."""

    plan: Plan
    out: Path
    recipe: str = ""
    threads: int = 2
    fresh: bool = False
    only: tuple[str, ...] = ()

    @property
    def workloads(self) -> list[Workload]:
        return [workload for workload in self.plan.workloads if self._is_wanted(workload.name)]

    @property
    def questions(self) -> list[Question]:
        return [question for question in self.plan.questions if self._is_wanted(question.name)]

    def _is_wanted(self, name: str) -> bool:
        return not self.only or name in self.only

    def check(self) -> None:
        """Refuse names that the plan does not have."""
        workloads, questions = self.plan.workloads, self.plan.questions
        known = sorted({*(each.name for each in workloads), *(each.name for each in questions)})
        unknown = sorted(set(self.only) - set(known))
        if unknown:
            raise RequestError(
                f"no workload {', '.join(map(repr, unknown))} in plan '{self.plan.name}'. "
                f"Known: {', '.join(map(repr, known))}."
            )


def run(asked: Asked, progress: Progress) -> Result:
    """Measure what is not stored yet; interrupted, it keeps the cells that were done."""
    asked.check()
    result = _stored(asked)
    left = [workload for workload in asked.workloads if workload.name not in result.cells]
    if left:
        _run_workloads(asked, left, result, progress)
    unasked = [question for question in asked.questions if question.name not in result.questions]
    if unasked:
        progress("questions", 0.0)
        with tempfile.TemporaryDirectory(prefix="vlexport-bench-") as name:
            for cell in ask_all(asked.plan, _recipe(asked), unasked, Path(name), asked.threads):
                result.questions[cell.question] = cell
        result.save(asked.out)
    return result


def _recipe(asked: Asked) -> str:
    return asked.recipe or default_recipe()


def _run_workloads(asked: Asked, left: Sequence[Workload], result: Result, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="vlexport-bench-") as name:
        folder = Path(name)
        progress("tower", 0.0)
        tower = write_tower(folder / "tower", contents_of(_recipe(asked), asked.plan.size), asked.plan.seed)
        stage = Stage(
            plan=asked.plan,
            tower=tower,
            folder=folder,
            threads=asked.threads,
            memory_cap=int(MEMORY_SHARE * memory.available()),
        )
        with Pool(stage) as pool:
            _measure(pool, left, result, asked.out, progress)


def _measure(pool: Pool, left: Sequence[Workload], result: Result, out: Path, progress: Progress) -> None:
    plan, clock = pool.stage.plan, Clock(pool.stage.plan)
    everybody = contenders(plan)
    progress("count operations", 0.0)
    counted = pool.count(plan.workloads[0].grids, [workload.grids for workload in left])
    if isinstance(counted, Failure):
        raise VlexportError(f"the operations of the workloads could not be counted: {counted.reason}")
    for index, workload in enumerate(left):
        field = Field(pool, workload, everybody)
        field.make_ready(progress)
        rounds = field.run_rounds(clock.seconds_for(left[index:], field.entries), progress)
        result.cells[workload.name] = Cell(
            workload=workload.name,
            series=workload.series,
            grids=[list(grid) for grid in workload.grids],
            patches=workload.patches,
            operations=counted[f"{index} operations"],
            scores=_scores(counted, index),
            product_operations=2.0 * plan.gemm[0] * plan.gemm[1] * plan.gemm[2],
            rounds=rounds,
            entries=field.entries,
        )
        result.save(out)
        _remove_files(pool, everybody, workload)


def _scores(counted: Mapping[str, float], index: int) -> dict[str, list[float]]:
    """By kind of block: score entries per head that are computed, and that are needed."""
    mine = {name: value for name, value in counted.items() if name.startswith(f"{index} ")}
    kinds = sorted({name.split(" ")[1] for name in mine if name.endswith(" needed")})
    return {kind: [mine[f"{index} {kind} computed"], mine[f"{index} {kind} needed"]] for kind in kinds}


def _remove_files(pool: Pool, everybody: Sequence[Contender], workload: Workload) -> None:
    """Programs that hold one shape are of no use to the next cell, and as large as the tower."""
    for contender in everybody:
        if contender.kind == "exporter":
            pool.drop(contender)
            shutil.rmtree(pool.stage.files_of(contender, workload), ignore_errors=True)


def _stored(asked: Asked) -> Result:
    """Cells of the same plan, sources and machine; anything else is measured anew."""
    machine = describe_machine(asked.threads)
    key = _key(asked, machine)
    if asked.out.is_file() and not asked.fresh:
        found = read_result(asked.out)
        if found.key == key:
            return found
    return Result(plan=asked.plan.to_json(), key=key, machine=machine, cells={})


def _key(asked: Asked, machine: Mapping[str, object]) -> str:
    sources = source_digest(Path(__file__).parents[1], recipe_folder())
    parts = (asked.plan.digest(), _recipe(asked), sources, str(sorted(machine.items())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe_machine(threads: int) -> dict[str, object]:
    """Processor, memory and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "processors": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": threads,
        "versions": dict(_versions()),
    }


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found
