"""Parts of the backends that compute in torch: runner, weights next to a program, programs on disk."""

from __future__ import annotations

import io
import json
import operator
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends._engine import FunctionRunner, refused_by
from vlexport.system import compile_caches

if TYPE_CHECKING:
    from io import RawIOBase

    from _typeshed import ReadableBuffer as Buffer
    from torch import Tensor
    from torch.export import ExportedProgram

# As torch names the bytes of tensors in an archive; of other constants it reads pickles.
TENSOR_FILE = re.compile(r"(?:weight|tensor)_\d+")
# Names of safetensors; towers hold no other types.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES |= {"I64": "int64", "I32": "int32", "I8": "int8"}


class TorchRunner(FunctionRunner):
    """A function of torch on a number of threads (0: torch's own); `kept` lives as long as the runner."""

    def __init__(
        self,
        function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        threads: int = 0,
        kept: object = None,
    ) -> None:
        super().__init__(function)
        self.threads, self.kept = threads, kept

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        library = f"torch {torch.__version__}"
        with torch_threads(self.threads), refused_by(library, tensors=tensors):
            return super().run(tensors)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's threads, which are the process's, and put the number back afterwards; 0 leaves it."""
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
    """Write one safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def read_weights(content: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of these bytes; nothing is copied."""
    import torch

    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    with warnings.catch_warnings():
        # Bytes cannot be written, and nobody writes weights.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        flat = torch.frombuffer(content, dtype=torch.uint8, offset=start)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype: torch.dtype = getattr(torch, DTYPES[entry["dtype"]])
            tensors[name] = flat[begin:end].view(dtype).reshape(entry["shape"])
    return tensors


def in_whole_blocks(program: ExportedProgram) -> None:
    """Let products of rows of any number repeat the last row up to a whole block, and drop it after them."""
    import torch
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    from vlexport.vision.attention.kernels import BLOCK

    aten, graph = torch.ops.aten, program.graph

    def call(function: Any, *args: Any) -> torch.fx.Node:
        """Insert a call with what it gives for the sizes of the trace."""
        node: torch.fx.Node = graph.call_function(function, args)
        values = torch.fx.map_arg(args, lambda used: used.meta["val"])
        with traced.fake_mode:
            node.meta["val"] = function(*values)
        return node

    for product in graph.find_nodes(op="call_function", target=aten.linear.default):
        rows: Any = product.args[0]
        traced = rows.meta["val"]
        if traced.ndim != 2 or statically_known_true(traced.shape[0] % BLOCK == 0):
            continue
        with graph.inserting_before(product):
            count = call(aten.sym_size.int, rows, 0)
            blocks = call(operator.floordiv, call(operator.add, count, BLOCK - 1), BLOCK)
            last = call(operator.sub, count, 1)
            numbers = call(aten.arange.default, call(operator.mul, blocks, BLOCK))
            padded = call(aten.index_select.default, rows, 0, call(aten.clamp.default, numbers, None, last))
            whole = call(aten.linear.default, padded, *product.args[1:])
        # It stays the node that outputs are named after.
        product.target, product.args = aten.slice.Tensor, (whole, 0, 0, count)
    program.graph_module.recompile()


def save_program(program: ExportedProgram, path: Path) -> None:
    """Write one .pt2 file; a full disk raises, where torch itself would end the process."""
    import torch

    with path.open("wb", buffering=0) as file:
        sink = _Sink(file)
        torch.export.save(program, sink)
    if sink.failure is not None:
        raise sink.failure


def load_program(content: Buffer, extra_files: dict[str, Any] | None = None) -> ExportedProgram:
    """Return the program of a .pt2 file, and fill in the texts beside it; weights are copied once."""
    import torch

    import vlexport.vision.attention.kernels  # noqa: F401  defines the attention operator that programs call

    _check_pickles(content)
    with compile_caches(), warnings.catch_warnings():
        # torch 2.11 reads weights in place; nobody writes to them.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.export.load(io.BufferedReader(_Source(content)), extra_files=extra_files)


def _check_pickles(content: Buffer) -> None:
    """Refuse pickles of anything but tensors: where torch fails to read one safely, it tries without care.

    Names decide in torch whether a constant is a pickle, so those of tensors alone pass.
    """
    import torch

    with zipfile.ZipFile(_Source(content)) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        # Python reads a name from other places too, torch only the one that is written first.
        if len(set(names)) != len(names) or names != [info.orig_filename for info in infos]:
            raise ValueError("an entry has two names, or two have one.")
        # Files of torch before 2.9 have no folder, and pickles under other names.
        if len({name.partition("/")[0] for name in names}) != 1:
            raise ValueError("written by an older torch.export.save, or by another program.")
        for name in names:
            if name.endswith(".pt"):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Detected pickle", category=UserWarning)
                    torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            elif name.endswith("_config.json"):
                entries = json.loads(archive.read(name)).get("config", {})
                for entry in entries.values():
                    if entry["use_pickle"] is not False or not TENSOR_FILE.fullmatch(entry["path_name"]):
                        raise ValueError(f"{name} has a pickle; tensors in their own bytes are expected.")


class _Source(io.RawIOBase):
    """Bytes as a file to read; `io.BytesIO` would copy those that are mapped."""

    def __init__(self, content: Buffer) -> None:
        super().__init__()
        self.content, self.at = memoryview(content), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.at = (0, self.at, len(self.content))[whence] + offset
        return self.at

    def readinto(self, buffer: Any, /) -> int:
        part = self.content[self.at : self.at + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


class _Sink(io.BytesIO):
    """A stream that passes everything on to a file and keeps its failure, which would end torch's writer."""

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
