"""Memory and disk estimates of a build: sizes of the tower times costs measured per backend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from vlexport.specs import Quantisation, is_quantizable

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 2**20
MEASURED = (
    "2 cores, Linux x86-64: towers of width 320, 640 and 1280, calls of 4, 1,024 and 4,096 patches; "
    "docs/results/memory.md compares them with other towers"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Measured costs of a backend in one dtype; `origin` names the machine.

    base             MiB of a process that runs, before weights: libraries, graph, threads
    opening          bytes per byte of weights at the peak of opening an engine
    weights          the same once it is open
    values           of all that a block computes for a patch, how many are alive at once while running
    build_base       MiB of a process that checks what it built, before weights
    build_weights    bytes at its peak per byte of weights in float32
    check_values     of all that a block computes, what the reference's float64 pass keeps for each patch
    disk             MiB of the files without weights
    compile_base     MiB before weights while the engine is made, where that takes more than a small check
    compile_weights  bytes per byte of weights in float32 then
    """

    base: float
    opening: float
    weights: float
    values: float
    build_base: float
    build_weights: float
    check_values: float
    disk: float
    origin: str = MEASURED
    compile_base: float = 0.0
    compile_weights: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeeds:
    """Bytes of an engine's file and, on its GPU, of weights and of calls by profile (None where unknown)."""

    engine: int
    weights: int
    calls: Mapping[str, int | None]
    origin: str

    def to_json(self) -> dict[str, object]:
        return {
            "engine_bytes": self.engine,
            "device_weights_bytes": self.weights,
            "device_call_bytes": dict(self.calls),
            "origin": self.origin,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerScale:
    """Sizes of a tower: weights, those that become integers, values of a block per patch, its input rows."""

    num_weights: int
    block_values: int
    row_width: int
    num_quantizable: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], row_width: int) -> TowerScale:
        outputs: defaultdict[str, int] = defaultdict(int)
        for name, shape in shapes.items():
            if name.startswith("blocks.") and len(shape) == 2:
                outputs[name.split(".")[1]] += shape[0]
        return cls(
            num_weights=sum(math.prod(shape) for shape in shapes.values()),
            block_values=max(outputs.values(), default=0),
            row_width=row_width,
            num_quantizable=sum(
                math.prod(shape) for name, shape in shapes.items() if is_quantizable(name, len(shape))
            ),
        )

    def stored(self, dtype: str, quantisation: Quantisation | None) -> int:
        integers = self.num_quantizable if quantisation else 0
        return (self.num_weights - integers) * ITEMSIZE[dtype] + integers


def run_memory(
    costs: Costs, tower: TowerScale, patches: int, dtype: str, quantisation: Quantisation | None = None
) -> int:
    """Return the peak memory of a process that opens the engine and makes one call of `patches`."""
    size = ITEMSIZE[dtype]
    # Pixels are in memory as they were given, in float32, and as the engine takes them.
    per_patch = (4 + size) * tower.row_width + size * costs.values * tower.block_values
    stored = tower.stored(dtype, quantisation)
    opening = costs.opening * stored
    running = costs.weights * stored + per_patch * patches
    return round(costs.base * MIB + max(opening, running))


def build_memory(costs: Costs, tower: TowerScale, checked_patches: int) -> int:
    """Return the peak memory of a build with its check; the largest sample has `checked_patches`."""
    weights = tower.num_weights * ITEMSIZE["float32"]
    checked = 8 * checked_patches * costs.check_values * tower.block_values
    checking = costs.build_base * MIB + costs.build_weights * weights + checked
    return round(max(checking, costs.compile_base * MIB + costs.compile_weights * weights))


def disk(costs: Costs | None, tower: TowerScale, dtype: str, quantisation: Quantisation | None = None) -> int:
    """Return the bytes of all files of the bundle; those of the weights where nothing was measured."""
    return round((costs.disk if costs else 0) * MIB + tower.stored(dtype, quantisation))
