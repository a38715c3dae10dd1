"""Requests that nobody can answer, kind by kind: each value of a field that it may not have."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from tests.runtime.test_requests import SHORT, embeddings, kept, of_image, of_video, patches
from vlexport.runtime.request import Request

NUMBERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
SHAPES = ((), (6,), (0, 128), (6, 0), (1, 6, 128), (6, 127), (6, 129), (7, 128), (5, 128), (6, 128, 1))
GRIDS: tuple[Any, ...] = (
    (0, 4, 6), (1, 4), (1, 4, 6, 1), (1.0, 4, 6), ("1", 4, 6), None, (True, 4, 6), (1, 2**31, 2), (-1, 4, 6),
    5, "146", (1, 4, 5), (2, 4, 6), (1, 10**9, 10**9),
)  # fmt: skip
KEPT: tuple[Any, ...] = ([], [-1, 2], [2, 2], [6], [3, 1], [0.0, 1.0], [[0, 1]], [True, False], [2**62])
SOURCES: dict[str, Any] = {
    "a number": 5, "a fraction": 1.5, "a mapping": {}, "no path": "", "a path with NUL": "a\0b",
    "a device": "/dev/zero", "a folder": "/", "no bytes": b"",
    "no bytes in an array": bytearray(), "an empty file": io.BytesIO(),
    "a text file": io.StringIO("a"), "a long path": "x" * 300, "a longer path": "x" * 5000, "a set": {1},
    "a generator of nothing": object, "base64 of nothing": "data:image/png;base64,",
    "base64 that is none": "data:image/png;base64,@@@", "base64 of no picture": "data:image/png;base64,AAAA",
    "floats": np.zeros((8, 8, 3), np.float32), "truths": np.zeros((8, 8, 3), bool), "no axis": np.array(3),
    "two axes": np.zeros((8, 8), np.uint8), "four channels": np.zeros((8, 8, 4), np.uint8),
    "no rows": np.zeros((0, 8, 3), np.uint8), "objects": np.array([[object()]]),
    "a structure": np.zeros(3, [("a", "u1")]), "dates": np.zeros((8, 8, 3), "datetime64[s]"),
    "complex values": torch.zeros(8, 8, 3, dtype=torch.complex64),
}  # fmt: skip
PARTS: tuple[Any, ...] = (
    5, None, "a", {}, {"type": None}, {"type": 5}, {"type": "audio", "audio": "a"}, {"type": "text"},
    {"type": "text", "text": 5}, {"type": "image"}, {"type": "video", "video": 5},
    {"type": "image", "image": {}},    {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
    {"type": "image", "image": "data:image/png;base64,@@"}, {"type": "image", "path": "/no/such"},
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    [5], ["a"], [None], [{}], [{"role": "user"}], [{"role": 5, "content": "a"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": {}}],
    [{"content": "a"}], [[{"role": "user", "content": "a"}]],
)  # fmt: skip


def malformed() -> Iterator[tuple[str, Request]]:
    """Yield requests by the name of what is wrong with them."""
    for dtype in NUMBERS:
        yield f"embeddings in {dtype}", of_image(embeddings(dtype=dtype))
        yield f"patches in {dtype}", of_image(replace(patches(), patches=torch.zeros(24, 1176).to(dtype)))
    for shape in SHAPES:
        yield f"embeddings {shape}", of_image(replace(embeddings(), embeds=torch.zeros(shape)))
        yield f"patches {shape}", of_image(replace(patches(), patches=torch.zeros(shape)))
    for grid in GRIDS:
        yield f"embeddings of grid {grid}", of_image(embeddings(grid=grid))
        yield f"patches of grid {grid}", of_image(patches(grid=grid))
    for indices in KEPT:
        yield f"kept {indices}", of_video(replace(kept(1, 2), kept=torch.tensor(indices)))
    for name, source in SOURCES.items():
        yield f"{name} as an image", of_image(source)
        yield f"{name} as a video", of_video(source)
    for part in PARTS:
        yield f"part {part}", Request(messages=[{"role": "user", "content": [part]}], generation=SHORT)
    for messages in MESSAGES:
        yield f"messages {messages}", Request(messages=messages, generation=SHORT)
    yield "layers", of_image(replace(embeddings(), layers={"x": torch.ones(6, 128)}))
    yield "two placeholders", Request(raw_prompt=prompt(IMAGE, IMAGE), images=[image(0)], generation=SHORT)
    yield "no placeholder", Request(raw_prompt="a", images=[image(0)], generation=SHORT)
    yield "a video's placeholder", Request(raw_prompt=prompt(VIDEO), images=[image(0)], generation=SHORT)
    yield "frames of two sizes", of_video([video(0).frames[0], image(0, 60, 60).frames[0]])
