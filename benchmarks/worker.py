"""The process of one contender: it builds its files, takes a workload, runs it, and sends numbers.

N patches, H heads, D head width, R runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import memory
from benchmarks.foreign import export_reference, open_exported, quiet
from benchmarks.plans import Contender
from benchmarks.towers import Grid, num_patches, random_items
from vlexport._build.export import cast_floats, export
from vlexport._build.graph import Graph
from vlexport.backends import Engine, EngineSpec, Folder, Options, capability_of, find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.errors import RequestError
from vlexport.evaluate.bench import LEAST_SAMPLE_S, MOST_REPEATS
from vlexport.parity.noise import in_dtype
from vlexport.recipe import recipe_for
from vlexport.specs import MediaItem, Precision, ShapeProfile, TensorSpec
from vlexport.system import give_back

Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A contender with the tower that it is measured on; `folder` holds its files."""

    contender: Contender
    tower: Path
    folder: Path
    threads: int
    gemm: tuple[int, int, int] = (1, 1, 1)
    seed: int = 0


def serve(pipe: Connection, job: Job) -> None:
    """Answer (verb, arguments) until the pipe closes, with a result and no error, or with an error."""
    os.dup2(2, 1)  # what libraries print is no data
    torch.set_num_threads(job.threads)
    server = Server(job)
    while True:
        try:
            verb, given = pipe.recv()
        except EOFError:
            return
        try:
            with quiet():
                answer = (getattr(server, verb)(*given), "")
        except Exception as error:  # noqa: BLE001  a contender that cannot is a finding
            answer = (None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        pipe.send(answer)


class Server:
    """A contender on its tower; `build`, `take`, `sample` and `count` are the verbs of `serve`."""

    def __init__(self, job: Job) -> None:
        self.job, self.contender = job, job.contender
        self.checkpoint = Checkpoint.open(job.tower)
        self.recipe = recipe_for(self.checkpoint)
        self.config = self.recipe.read_config(self.checkpoint)
        self._opened = False
        self._base = 0

    def build(self, grids: Sequence[Grid] = ()) -> tuple[float, EngineSpec | None]:
        """Write the contender's files, whole or not at all; return seconds and the engine's spec."""
        started = time.perf_counter()
        spec: EngineSpec | None = None
        beside = self.job.folder.with_name(f"{self.job.folder.name}.partial")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        if self.contender.kind == "exporter":
            reference = self.recipe.reference(self.checkpoint)
            exported, inputs = export_reference(reference, self._random(grids), target=self.contender.library)
            exported.save(beside, inputs)
        else:
            graph = self._graph()
            find_backend(self.contender.library).build(graph, Options(threads=self.job.threads), beside)
            spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
        beside.replace(self.job.folder)
        return time.perf_counter() - started, spec

    def take(self, grids: Sequence[Grid], output: Path | None, spec: EngineSpec | None) -> Numbers:
        """Get ready for a call and run it once, which also makes what is made once."""
        from safetensors.torch import save_file

        fresh, self._opened = not self._opened, True
        if fresh:
            self.open(spec)
            # The smallest call first, where calls may differ: growth counts from then on.
            if self.contender.kind not in ("exporter", "compiled"):
                mixes = self.recipe.shape_sets(self.config).values()
                self.load(self._random(min(([grid for _, grid in mix] for mix in mixes), key=num_patches)))
                self._timed()
        # Blocks that the C library keeps after a larger call are no part of this one.
        give_back()
        self._base = memory.own() if fresh else self._base
        memory.forget_peak()
        self.load(self._random(grids))
        first, tokens = self._timed()
        if output is not None:
            save_file({"tokens": tokens.float().contiguous()}, output)
        del tokens
        most = memory.own_peak()
        if self.contender.kind == "compiled":
            # What compiling leaves behind is not needed for a run.
            give_back()
            self._base = memory.own()
        return {"first_seconds": first, "peak": most}

    def sample(self) -> Numbers:
        """Run once, or a short call several times; return the mean, what was held before, and the peak."""
        memory.forget_peak()
        seconds: list[float] = []
        while len(seconds) < MOST_REPEATS and sum(seconds) < LEAST_SAMPLE_S:
            seconds.append(self._timed()[0])
        return {"seconds": sum(seconds) / len(seconds), "base": self._base, "peak": memory.own_peak()}

    def count(
        self, small: Sequence[Grid], calls: Sequence[Sequence[Grid]]
    ) -> list[tuple[float, dict[str, list[float]]]]:
        """Return for each call its operations, and by kind of block the scores [computed, needed]."""
        per_token, per_score = self._counted(self._random(small))
        found = []
        for grids in calls:
            items = self._random(grids)
            work = self.recipe.packing(self.config).attention_work(items, "grouped")
            scores = sum(per_score[kind] * needed for kind, (_, needed) in work.items())
            pairs = {kind: [float(both[0]), float(both[1])] for kind, both in work.items()}
            found.append((per_token * self._num_tokens(items) + scores, pairs))
        return found

    def _counted(self, items: Sequence[MediaItem]) -> tuple[float, dict[str, float]]:
        """Count one small call; `items` must give every kind of block another number of scores.

        Two per multiply-add. Zeros that fill up the inner width of a tower count too: a thousandth at 3,420.
        """
        work = self.recipe.packing(self.config).attention_work(items, "grouped")
        known = {count: kind for kind, (count, _) in work.items()}
        found = dict.fromkeys(work, 0.0)

        def attention(q_NHD: Tensor, k: Tensor, v: Tensor, runs_R2: Tensor, scale: float, **_: object) -> int:  # noqa: ARG001
            scores = int((runs_R2[:, 0].long() * runs_R2[:, 1].long() ** 2).sum())
            if scores not in known:
                raise RequestError(f"{scores} scores are of no kind of block: {known}.")
            found[known[scores]] += 4 * q_NHD.shape[1] * q_NHD.shape[2]
            return 0

        setattr(attention, "_get_raw", True)  # noqa: B010  the counter then hands over tensors, not shapes
        counted = {torch.ops.vlexport.segment_attention: attention}
        with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=counted) as counter:
            inputs = self.recipe.prepare(self.config, items, "grouped")
            self.recipe.tower(self.checkpoint, "float32")(inputs)
        return counter.get_total_flops() / self._num_tokens(items), found

    def open(self, spec: EngineSpec | None) -> None:
        if self.contender.kind in ("eager", "compiled"):
            self._reference = self.recipe.reference(self.checkpoint)
        elif self.contender.kind == "exporter":
            self._exported, self._inputs = open_exported(self.job.folder)
        else:
            assert spec is not None
            backend = find_backend(self.contender.library)
            options = Options(threads=self.job.threads)
            self._form = backend.form
            self._engine = Engine(backend.open(Folder(self.job.folder), spec, options), spec)

    def load(self, items: list[MediaItem]) -> None:
        """Get ready for this call; none of it is timed."""
        self.items = items
        if self.contender.kind == "compiled":
            torch.compiler.reset()
            self._reference.module.compile()
        if self.contender.kind == "product":
            self._inputs = self._product_input()

    def run(self) -> Tensor:
        """Run the call, from patches and grids to tokens; inputs of exporters' programs come ready made."""
        contender = self.contender
        if contender.kind in ("eager", "compiled"):
            (tokens,) = in_dtype(self._reference, self.items, contender.dtype).values()
        elif contender.kind == "exporter":
            tokens = self._exported.run(self._inputs)
        elif contender.kind == "product":
            (tokens,) = self._engine.run(self._inputs).values()
        else:
            inputs = self.recipe.prepare(self.config, self.items, self._form)
            (tokens,) = self._engine.run(cast_floats(inputs, contender.dtype)).values()
        return tokens

    def _timed(self) -> tuple[float, Tensor]:
        with torch.inference_mode():
            started = time.perf_counter()
            tokens = self.run()
            return time.perf_counter() - started, tokens

    def _random(self, grids: Sequence[Grid]) -> list[MediaItem]:
        return random_items(self.recipe, self.config, grids, self.job.seed)

    def _num_tokens(self, items: Sequence[MediaItem]) -> int:
        return sum(self.recipe.num_tokens(self.config, item) for item in items)

    def _graph(self) -> Graph:
        backend, dtype = find_backend(self.contender.library), self.contender.dtype
        form, able = backend.form, capability_of(backend, dtype, self.contender.quantise)
        if self.contender.kind != "product":
            scheme = able.quantisation if able else None
            graph = export(self.recipe, self.checkpoint, dtype=dtype, form=form, quantisation=scheme)
            return with_dense_masks(graph) if self.contender.kind == "dense" else graph
        rows, inner, columns = self.job.gemm
        # The yardstick for arithmetic: one matrix product with constant weights.
        module = _Product(inner, columns).to(getattr(torch, dtype))
        facts: dict[str, Any] = {"recipe": self.recipe, "checkpoint": self.checkpoint, "config": self.config}
        return Graph(
            **facts,
            precision=Precision(dtype=dtype),
            form=form,
            profile=ShapeProfile("product", {}),
            inputs=(TensorSpec(name="x", dtype=dtype, shape=(rows, inner)),),
            outputs=(TensorSpec(name="y", dtype=dtype, shape=(rows, columns)),),
            module=module,
            program=torch.export.export(module, (self._product_input(),)),
        )

    def _product_input(self) -> dict[str, Tensor]:
        rows, inner, _ = self.job.gemm
        return {"x": torch.randn(rows, inner, dtype=getattr(torch, self.contender.dtype))}


class _Product(nn.Module):
    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, inner) * inner**-0.5, requires_grad=False)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": nn.functional.linear(inputs["x"], self.weight)}


def with_dense_masks(graph: Graph) -> Graph:
    """Return the graph with attention over all pairs of patches, as an export without segments has it."""
    program = graph.program.run_decompositions({torch.ops.vlexport.segment_attention.default: attend_densely})
    return replace(graph, program=program)


def attend_densely(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R2: Tensor, scale: float) -> Tensor:
    """Compute softmax over all N patches with minus infinity between segments."""
    segment_N = segment_ids(runs_R2, q_NHD.shape[0])
    apart_NN = segment_N[:, None] != segment_N[None, :]
    bias_NN = torch.zeros_like(apart_NN, dtype=q_NHD.dtype).masked_fill(apart_NN, float("-inf"))
    scores_HNN = torch.matmul(q_NHD.transpose(0, 1) * scale, k_NHD.permute(1, 2, 0)) + bias_NN
    return torch.matmul(scores_HNN.softmax(-1), v_NHD.transpose(0, 1)).transpose(0, 1).contiguous()


def segment_ids(runs_R2: Tensor, num_rows: int) -> Tensor:
    """Return a number for each row that it shares with the rows of its segment only."""
    runs = runs_R2.long()
    end_R = (runs[:, 0] * runs[:, 1]).cumsum(0)
    place_N = torch.arange(num_rows, device=runs.device)
    run_N = (place_N[:, None] >= end_R[None, :]).sum(-1)
    length_N = runs[:, 1].index_select(0, run_N)
    start_N = (end_R - runs[:, 0] * runs[:, 1]).index_select(0, run_N)
    return run_N * num_rows + (place_N - start_N) // length_N
