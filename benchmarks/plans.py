"""The plan of a run, decided before it starts: tower, workloads, contenders, rounds, limits.

The towers have the released models' width, head width and inner width at a smaller depth, one block in
four with full attention at most, so that a run fits two processors and an hour.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from benchmarks.towers import DecoderSize, Grid, TowerSize, num_patches
from vlexport.backends import backend_names, find_backend, runs_here

Kind = Literal["eager", "compiled", "exporter", "dense", "ours", "product"]

BASELINE = "Hugging Face eager float32"
TWIN = " (twin)"
# The library that a format of transformers' exporters needs.
LIBRARIES = {"onnx": "onnxruntime", "openvino": "openvino"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One call: its media as grids in patches. Workloads of one series show growth."""

    name: str
    grids: tuple[Grid, ...]
    rounds: int
    series: str = ""

    @property
    def patches(self) -> int:
        return num_patches(self.grids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A video that is asked about, whole and at each rate of pruning."""

    name: str
    frames: int
    side: int
    rates: tuple[float, ...] = (0.5, 0.75)
    new_tokens: int = 16
    rounds: int = 5


SMALL_DECODER = DecoderSize(heads=2, kv_heads=1, layers=4, inner=688, vocabulary=512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Cells, rounds and rules of a run.

    seconds        for everything; late cells get fewer rounds, never fewer than `least_rounds`
    dense_patches  largest call that a contender with patches x patches masks is given
    gemm           rows, inner and columns of the product whose speed is the ceiling
    build_apart    in a process of its own, so that building leaves nothing in the memory that is measured
    slow_probe     a round counts only if its product ran at this share of the cell's best or faster
    exporters      formats of transformers' exporters; each needs the library of its name
    questions      are asked of a decoder of size `decoder` behind an engine of `asked_backend`, float32
    twin           of which contender a second process runs, side by side, as a yardstick for noise
    """

    name: str
    size: TowerSize
    workloads: tuple[Workload, ...]
    gemm: tuple[int, int, int]
    dense_patches: int
    seconds: int
    build_seconds: int
    prepare_seconds: int
    sample_seconds: int
    least_rounds: int = 3
    build_apart: bool = True
    slow_probe: float = 0.6
    exporters: tuple[str, ...] = ("onnx", "openvino")
    twin: str = "onnxruntime float32"
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8")
    kinds: tuple[Kind, ...] = ("eager", "compiled", "exporter", "dense", "ours", "product")
    seed: int = 0
    decoder: DecoderSize = SMALL_DECODER
    asked_backend: str = "onnxruntime"
    questions: tuple[Question, ...] = ()

    def digest(self) -> str:
        """Return a digest of everything but the time; results of another plan are not resumed."""
        decided = {name: value for name, value in asdict(self).items() if name != "seconds"}
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One process that gives samples; `library` is a backend, or a format of transformers' exporters."""

    name: str
    kind: Kind
    dtype: str = "float32"
    library: str = ""
    quantise: str | None = None

    def folder_name(self, workload: Workload) -> str:
        """Return where its files lie: twins run the same ones, exporters' programs hold one shape only."""
        parts = (self.name.removesuffix(TWIN), *([workload.name] if self.kind == "exporter" else []))
        return "-".join("".join(sign if sign.isalnum() else "-" for sign in part) for part in parts)

    def refuses(self, plan: Plan, workload: Workload) -> str:
        """Return why this workload is not for it; empty if it is."""
        if self.kind == "dense" and workload.patches > plan.dense_patches:
            return f"patches x patches masks stop at {plan.dense_patches} patches"
        return ""


def contenders(plan: Plan) -> list[Contender]:
    """Return everybody whom this machine can run, the baseline first, yardsticks last."""
    ours = [
        Contender(
            name=f"{backend.name} {able.spelled}",
            kind="ours",
            dtype=able.dtype,
            library=backend.name,
            quantise=able.quantisation.name if able.quantisation else None,
        )
        for backend in map(find_backend, backend_names())
        for able in backend.capabilities
        if able.spelled in plan.precisions and runs_here(backend, able.precision)
    ]
    halves = sorted({each.dtype for each in ours} - {"float32"})
    every = [
        Contender(name=BASELINE, kind="eager"),
        *(Contender(name=f"Hugging Face eager {dtype}", kind="eager", dtype=dtype) for dtype in halves),
        Contender(name="Hugging Face torch.compile", kind="compiled"),
        *(
            Contender(name=f"transformers exporter {form}", kind="exporter", library=form)
            for form in plan.exporters
            if importlib.util.find_spec(LIBRARIES[form]) is not None
        ),
        Contender(name="dense masks in onnxruntime", kind="dense", library="onnxruntime"),
        *ours,
        *(replace(each, name=each.name + TWIN) for each in ours if each.name == plan.twin),
        *(
            replace(each, name=f"product in {each.name}", kind="product")
            for each in ours
            if not each.quantise
        ),
    ]
    return [each for each in every if each.kind in plan.kinds]


def _frames(count: int, pixels: int, rounds: int) -> Workload:
    """Return a call of a growth series: frames in pairs, a single one as an image."""
    grids, side = ((max(1, count // 2), pixels // 14, pixels // 14),), f"{pixels}x{pixels}"
    name = f"one {side} image" if count == 1 else f"{count} frames of {side}"
    return Workload(name=name, grids=grids, rounds=rounds, series="frames")


FULL = Plan(
    name="full",
    size=TowerSize(depth=4, width=1280, heads=16, inner=3420, out=2048, full_blocks=(3,)),
    workloads=(
        _frames(1, 448, 11),
        Workload(name="32 images of 10x14 patches", grids=((1, 10, 14),) * 32, rounds=5),
        Workload(
            name="five sizes, one a video",
            grids=((1, 36, 52), (1, 10, 14), (1, 22, 30), (1, 8, 8), (4, 18, 24)),
            rounds=5,
        ),
        Workload(name="a page and 8 icons", grids=((1, 92, 66), *((1, 6, 6),) * 8), rounds=4),
        _frames(16, 448, 3),
        Workload(name="one 1080p image", grids=((1, 78, 138),), rounds=3),
        Workload(name="a photo and 40 crops", grids=((1, 128, 128), *((1, 12, 18),) * 40), rounds=3),
        _frames(4, 448, 9),
        _frames(8, 448, 5),
        _frames(32, 448, 3),
    ),
    # The released inner width, filled up as towers are: MKL loses a third of its speed at 3420.
    gemm=(4096, 1280, 3424),
    dense_patches=4500,
    seconds=2700,
    build_seconds=300,
    prepare_seconds=240,
    sample_seconds=240,
    # A ninth of the released model's layers and vocabulary, as the tower has an eighth of its blocks.
    decoder=DecoderSize(heads=16, kv_heads=2, layers=4, inner=11008, vocabulary=16882),
    questions=(
        Question(name="asked about 4 frames of 448x448", frames=4, side=448),
        Question(name="asked about 16 frames of 448x448", frames=16, side=448, rounds=3),
    ),
)

QUICK = Plan(
    name="quick",
    size=TowerSize(depth=2, width=160, heads=2, inner=432, out=128, full_blocks=(1,)),
    workloads=(
        _frames(1, 224, 5),
        Workload(
            name="four sizes, one a video",
            grids=((1, 18, 26), (1, 10, 14), (1, 8, 8), (2, 12, 18)),
            rounds=5,
        ),
        *(_frames(count, 224, 5) for count in (4, 8, 16)),
    ),
    gemm=(1024, 320, 864),
    dense_patches=2048,
    seconds=60,
    build_seconds=60,
    prepare_seconds=40,
    sample_seconds=20,
    build_apart=False,
    precisions=("float32",),
    questions=(Question(name="asked about 8 frames of 224x224", frames=8, side=224),),
)
