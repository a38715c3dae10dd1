"""What the backends that compute in torch share: threads, processor features, weights beside a program."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.errors import BundleError, ResourceError, VlexportError

if TYPE_CHECKING:
    from io import RawIOBase

    from _typeshed import ReadableBuffer as Buffer
    from torch import Tensor
    from torch.export import ExportedProgram

# Names of safetensors; towers hold no other types.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32"}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's threads are the process's, so the count holds for a call and is put back; 0 leaves it."""
    import torch

    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def read_weights(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file that lie in these very bytes: nothing is copied."""
    import torch

    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    with warnings.catch_warnings():
        # Bytes cannot be written, and nobody writes weights.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        flat = torch.frombuffer(content, dtype=torch.uint8, offset=start)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype: torch.dtype = getattr(torch, DTYPES[entry["dtype"]])
            found[name] = flat[begin:end].view(dtype).reshape(entry["shape"])
    return found


def explained(error: RuntimeError, backend: str, tensors: Mapping[str, Tensor]) -> VlexportError:
    """A failure inside torch, with the shapes that caused it."""
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if "can't allocate memory" in str(error) or "out of memory" in str(error):
        return ResourceError(f"out of memory in backend '{backend}' at {shapes}. Send fewer items at once.")
    return BundleError(
        f"backend '{backend}' failed at {shapes}, which its manifest allows: {error}. Build the bundle again "
        "or fetch an intact copy."
    )


def save_program(program: ExportedProgram, path: Path) -> None:
    """One .pt2 file; a disk that is full is an error of ours, not the end of the process."""
    import torch

    with path.open("wb", buffering=0) as file:
        sink = _Sink(file)
        torch.export.save(program, sink)
    if sink.failure is not None:
        raise sink.failure


class _Sink(io.BytesIO):
    """Passes everything on to a file and keeps its failure: torch's writer ends the process when one tells.

    Holds nothing itself; the rewinding that torch does at the end moves nothing.
    """

    def __init__(self, file: RawIOBase) -> None:
        super().__init__()
        self.file = file
        self.failure: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        rest = memoryview(data).cast("B")
        while self.failure is None and rest:
            try:
                rest = rest[self.file.write(rest) or 0 :]
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes
