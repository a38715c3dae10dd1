"""Frames given as numbers: arrays, tensors and .npy files.   T frames, H rows, W columns."""

from __future__ import annotations

import math
import os
from tokenize import TokenError
from typing import TYPE_CHECKING, BinaryIO, TypeGuard

from vlexport.errors import MediaError
from vlexport.media.limits import MediaLimits

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

NPY_START = b"\x93NUMPY"
# What numpy raises on headers that are no Python literal, a wrong literal, or none at all.
DAMAGED = (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError, TokenError)


def unreadable(tensor: Tensor) -> str | None:
    """Return why the values of a tensor are not all there, one after the other; None where they are."""
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if layout != "strided":
        return f"a {layout} tensor"
    if tensor.device.type == "meta":
        return "a tensor without values (device 'meta')"
    return "a quantised tensor" if tensor.is_quantized else None


def is_array(source: object) -> TypeGuard[np.ndarray | Tensor]:
    """Return whether a source is an array or a tensor."""
    import numpy as np
    import torch

    return isinstance(source, np.ndarray | torch.Tensor)


def to_frames(source: np.ndarray | Tensor, kind: str, limits: MediaLimits) -> Tensor:
    """Return [T, H, W, 3] on the source's device, sharing memory where possible; takes [T, 3, H, W] too."""
    import numpy as np
    import torch

    if isinstance(source, torch.Tensor) and (reason := unreadable(source)):
        raise MediaError(f"{kind}: {reason} given, a dense tensor of pixels expected.")
    axes = 3 if kind == "image" else 4
    if len(source.shape) == axes and source.shape[-1] != 3 and source.shape[-3] == 3:
        if isinstance(source, np.ndarray):
            source = np.moveaxis(source, -3, -1)
        else:
            source = source.movedim(-3, -1).contiguous()
    shape, dtype = tuple(source.shape), str(source.dtype).removeprefix("torch.")
    check_frames(f"{kind} array", dtype, shape if axes == 4 else (1, *shape), limits)
    if isinstance(source, np.ndarray):
        whole = np.ascontiguousarray(source)
        source = torch.from_numpy(whole if whole.flags.writeable else whole.copy())
    return source if axes == 4 else source[None]


def check_frames(name: str, dtype: str, shape: tuple[int, ...], limits: MediaLimits) -> None:
    """Refuse what is not uint8 [T, H, W, 3] with at least one pixel, or is over a limit."""
    if dtype != "uint8" or len(shape) != 4 or shape[-1] != 3:
        dims = "height, width, 3" if name.startswith("image") else "frames, height, width, 3"
        sizes = list(shape[1:] if name.startswith("image") else shape)
        raise MediaError(
            f"{name}: {dtype} {sizes} given, uint8 [{dims}] in RGB expected. "
            "Scale to 0..255, move the channels last or first, or pass PIL images for grey and transparency."
        )
    if min(shape) < 1:
        raise MediaError(f"{name}: {list(shape)} holds no pixels. Pass at least one frame.")
    limits.check_frames(name, *shape[:3])


def read_npy(file: BinaryIO, name: str, limits: MediaLimits) -> Tensor:
    """Read the frames of a .npy file; everything is checked on its header before memory is taken."""
    import numpy as np
    import torch

    shape, by_columns, dtype = _npy_header(file, name)
    check_frames(name, dtype, shape, limits)
    rest = os.fstat(file.fileno()).st_size - file.tell()
    if rest != math.prod(shape):
        raise MediaError(
            f"{name}: {rest} bytes follow the header, {math.prod(shape)} expected for {list(shape)}. "
            "It is cut short or holds something else too; write it again."
        )
    frames = np.empty(shape[::-1] if by_columns else shape, np.uint8)
    if file.readinto(frames.data.cast("B")) != frames.nbytes:  # type: ignore[attr-defined]
        raise MediaError(f"{name}: it changed while it was read. Try again.")
    return torch.from_numpy(np.ascontiguousarray(frames.T) if by_columns else frames)


def _npy_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], bool, str]:
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(file)
        shape, by_columns, dtype = readers[version](file)
    except DAMAGED as error:
        raise MediaError(
            f"{name}: a .npy file with a damaged header. Write it with numpy.save as uint8."
        ) from error
    return tuple(int(size) for size in shape), bool(by_columns), str(dtype)
