"""What an engine will take on a GPU, told before it is built; held to what the library says in builds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vlexport.backends._tensorrt import expected_network
from vlexport.estimate import ITEMSIZE, MIB, DeviceNeeds, TowerScale
from vlexport.specs import ShapeProfile, TensorSpec

SIZES = {**ITEMSIZE, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCosts:
    """What a library takes in one dtype.

    kernels  MiB of the engine's file for each profile, beside weights
    values   of all that a block computes for a patch, how many scratch memory holds at once; None: no rule
    """

    kernels: float
    values: float | None
    origin: str


# Blocks of width 64 to 1280, 2 to 8 deep; profiles thumbnail, image and video. Scratch memory of halves
# was 2.94 to 3.15 times what a block computes. In float32 the scores of attention are stored: 7 GB at width
# 320 with `image`, 59 GB with `video`, by no simple rule of blocks.
ORIGIN = "TensorRT for RTX 1.7.1.116 while it builds for sm89; never compared with a GPU"
HALF = DeviceCosts(kernels=7.0, values=3.05, origin=ORIGIN)
COSTS = {
    "float32": DeviceCosts(kernels=3.5, values=None, origin=ORIGIN),
    "bfloat16": HALF,
    "float16": HALF,
}


def foresee(
    profiles: Sequence[ShapeProfile], tower: TowerScale, inputs: Sequence[TensorSpec], dtype: str
) -> DeviceNeeds:
    """In float16 the islands that a tower may need are not counted."""
    costs, weights = COSTS[dtype], tower.stored(dtype, None)
    return DeviceNeeds(
        engine=round(weights + costs.kernels * MIB * len(profiles)),
        weights=weights,
        calls={profile.name: _call(profile, tower, inputs, dtype) for profile in profiles},
        origin=costs.origin,
    )


def _call(profile: ShapeProfile, tower: TowerScale, inputs: Sequence[TensorSpec], dtype: str) -> int | None:
    """Scratch memory of the largest call, and its inputs."""
    shapes = {name: largest for name, (_, _, largest) in expected_network.shapes_of(profile, inputs).items()}
    values = COSTS[dtype].values
    if values is None:
        return None
    given = sum(math.prod(shapes[spec.name]) * SIZES[spec.dtype] for spec in inputs)
    return round(given + values * tower.block_values * ITEMSIZE[dtype] * shapes["patches"][0])
