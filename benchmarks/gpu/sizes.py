"""The sizes of a run: the released model on a GPU, the same steps in seconds on a processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlexport.recipes.demo.qwen2_5_vl import DEFAULT, Tiny

from benchmarks.towers import THREE_BILLION

Grid = tuple[int, int, int]
FRAME = (32, 32)  # 448 x 448 pixels, 256 tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The work of each step.

    calls     grids by name, of the towers; `frames` of the comparison of one long frame with many short ones
    pruning   frames of 256 tokens; `text` the decoder's own sizes, read for prompts of `prompts` tokens
    answers   requests of the soak; `largest_budget` is the last size that is captured, in tokens
    compiler  of torch.compile, for the decoder and transformers; "eager" traces and compiles nothing
    """

    model: Tiny
    calls: dict[str, tuple[Grid, ...]]
    frames: dict[str, tuple[Grid, ...]]
    pruning: tuple[int, ...]
    text: Tiny
    prompts: tuple[int, ...]
    new_tokens: int
    rounds: int
    answers: int
    matmul: int
    copy_bytes: int
    attention_rows: int
    largest_budget: int
    compiler: str


FULL = Sizes(
    model=replace(THREE_BILLION, with_decoder=False, branch_gain=64**-0.5),
    calls={
        "1 x 448": ((1, *FRAME),),
        "4 x 448": ((1, *FRAME),) * 4,
        "1080p": ((1, 78, 138),),
        "ragged 16": tuple((1, 16 + 4 * (5 * at % 13), 16 + 4 * (7 * at % 11)) for at in range(16)),
        "16 frames of 448": ((16, *FRAME),),
        "64 frames of 448": ((64, *FRAME),),
    },
    frames={
        "1,024 tokens in 1 frame": ((1, 64, 64),),
        "1,024 tokens in 16 frames": ((16, 16, 16),),
        "4,096 tokens in 1 frame": ((1, 128, 128),),
        "4,096 tokens in 64 frames": ((64, 16, 16),),
        "16,384 tokens in 1 frame": ((1, 256, 256),),
        "16,384 tokens in 256 frames": ((256, 16, 16),),
    },
    pruning=(16, 64, 128),
    text=replace(THREE_BILLION, depth=1),
    prompts=(512, 4096),
    new_tokens=64,
    rounds=20,
    answers=200,
    matmul=8192,
    copy_bytes=4 * 2**30,
    attention_rows=8192,
    largest_budget=16384,
    compiler="inductor",
)
TINY = Sizes(
    model=replace(DEFAULT, depth=2, dtype="bfloat16", with_decoder=False),
    calls={"one image": ((1, 8, 12),), "ragged": ((1, 4, 6), (2, 8, 10))},
    frames={"64 tokens in 1 frame": ((1, 16, 16),), "64 tokens in 8 frames": ((8, 4, 8),)},
    pruning=(4,),
    text=replace(DEFAULT, depth=1),
    prompts=(64,),
    new_tokens=4,
    rounds=3,
    answers=6,
    matmul=256,
    copy_bytes=2**22,
    attention_rows=256,
    largest_budget=64,
    compiler="eager",
)
