"""Parts of the backends that compute in torch: runner, whole blocks of rows, weights next to a program."""

from __future__ import annotations

import json
import operator
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from vlexport.backends._engine import FunctionRunner, refused_by

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

# Names of safetensors; towers hold no other types.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES |= {"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64"}
# Threads that have set torch's number of threads, and what the first of them found.
_SETTING, _SETTERS, _FOUND = Lock(), list[int](), [0]


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

    if not count:
        yield
        return
    me = get_ident()
    with _SETTING:
        if not _SETTERS:
            _FOUND[0] = torch.get_num_threads()
        # A thread that begins meanwhile finds the number that another one has set.
        before = torch.get_num_threads() if me in _SETTERS else _FOUND[0]
        _SETTERS.append(me)
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _SETTING:
            _SETTERS.remove(me)
            torch.set_num_threads(before)


def write_weights(path: Path, program: ExportedProgram) -> None:
    """Write the tensors of a program, of which the trace found some outside the state, as one file."""
    import torch

    kept: dict[str, Tensor] = {}
    places = set()
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if isinstance(tensor, torch.Tensor):
            kept[name] = tensor.detach().contiguous()
            # The file has no tensor under two names.
            if (place := kept[name].data_ptr()) in places:
                kept[name] = kept[name].clone()
            places.add(place)
    write_tensors(kept, path, {})


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file until the disk has it; equal tensors and metadata give equal bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # The library's file can only be read by its owner; this one gets the rights of any new file.
    path.touch()
    rights = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, dict(metadata) or None)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(rights)
    with path.open("r+b") as file:
        if metadata:
            # The library writes them in another order in every process.
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) | {"__metadata__": dict(metadata)}
            file.seek(8)
            file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))
            file.flush()
        os.fsync(file.fileno())


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
