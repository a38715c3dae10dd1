"""A selection as something that starts at once: compiled in place, an AOTInductor package, an ONNX file.

T frames, N tokens per frame, D width, K kept tokens.

All take embeddings (T, N, D) and `share_K` (selectors.py), so one package serves every size: K is a length
that the host chooses per call. A package is made for one dtype; AOTInductor packages for one device as well.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from vlexport.errors import BundleError, InputError, UnsupportedError
from vlexport.positions.mrope import pruned_positions
from vlexport.positions.plan import KeptWriter, write_kept_positions
from vlexport.positions.rules import PlacedMedia, PositionRule
from vlexport.pruning.selectors import MAX_WIDTH, BestRows, Select, Selection, Selector

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Standard operators of this opset are what every runtime accepts.
OPSET = 18

# No two sizes alike: equal ones would be taken for one and the same size by the first compilation.
EXAMPLE_TND, EXAMPLE_K = (6, 40, 96), 70

ONNX_INPUTS = ("embeds", "share")
ONNX_OUTPUTS = ("rows", "kept")


def compiled(selector: Selector, *, dtype: str, device: str = "cpu") -> Selection:
    """Compile the selection, whole and once, for all sizes of 2 and more.

    A size of 1 is a constant to the compiler: one program for each place where it may occur. Calls that have
    one (a single token per frame, a single channel) are too small to gain from it and run uncompiled.
    """
    # Selectors and dtypes share one piece of code; isolated, they do not use up each other's recompilations.
    fused: Select = torch.compile(  # type: ignore[call-overload]  # the overloads lag behind the function
        BestRows(selector),
        fullgraph=True,
        dynamic=True,
        options=_precision(selector),
        isolate_recompiles=True,
    )
    fused(*_example(dtype, device))
    plain = BestRows(selector)

    def run(embeds_TND: Tensor, share_K: Tensor) -> tuple[Tensor, Tensor]:
        return (plain if 1 in (*embeds_TND.shape, *share_K.shape) else fused)(embeds_TND, share_K)

    return Selection(selector=selector, run=run)


def compiled_positions() -> KeptWriter:
    """Compile `write_kept_positions`, whole, for all sizes of 2 and more; a size of 1 compiles once more."""
    write: KeptWriter = torch.compile(  # type: ignore[call-overload]  # the overloads lag behind the function
        write_kept_positions, fullgraph=True, dynamic=True, isolate_recompiles=True
    )
    rule = PositionRule(kind="time_scaled", tokens_per_second=2)
    media = [
        PlacedMedia(modality="video", offset=offset, length=length, grid=(4, 6, 10), seconds_per_grid=1.0)
        for offset, length in ((5, 22), (30, 17))
    ]
    pruned_positions(61, media, [torch.arange(each.length) for each in media], rule, write=write)
    return write


def write_aoti(selector: Selector, path: Path, *, dtype: str, device: str = "cpu") -> Path:
    """Compile into one file that a process without a compiler loads; needs a C++ compiler now."""
    from torch._inductor import aoti_compile_and_package

    if path.suffix != ".pt2":
        raise InputError(f"package '{path.name}': expected a name that ends in .pt2.")
    program = _exported(selector, dtype, device)
    with _quiet_torch():
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=_precision(selector))
    return path


def load_aoti(selector: Selector, path: Path) -> Selection:
    """Open what `write_aoti` wrote for this selector; a program, so only what was built here or approved."""
    from torch._inductor import aoti_load_package

    if not path.is_file():
        raise BundleError(f"package '{path}': no such file. Expected what `write_aoti` wrote; build again.")
    package = aoti_load_package(str(path))

    def run(embeds_TND: Tensor, share_K: Tensor) -> tuple[Tensor, Tensor]:
        rows_KD, kept_K = package(embeds_TND, share_K)
        return rows_KD, kept_K

    return Selection(selector=selector, run=run)


def write_onnx(selector: Selector, path: Path, *, dtype: str) -> Path:
    """Write an ONNX file, `embeds`, `share` to `rows`, `kept`, in standard operators."""
    onnx_program(selector, dtype=dtype).save(str(path))
    return path


def onnx_program(selector: Selector, *, dtype: str) -> torch.onnx.ONNXProgram:
    """Translate the selection into standard operators."""
    program = _exported(selector.portable(), dtype, "cpu")
    with _quiet_torch():
        translated = torch.onnx.export(
            program,
            (),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(ONNX_INPUTS),
            output_names=list(ONNX_OUTPUTS),
        )
    assert translated is not None
    return translated


def _precision(selector: Selector) -> dict[str, str | int | bool | Callable[..., object]]:
    """Return inductor's settings for this selector, scoped to one compilation."""
    if selector.sums_are_exact:
        return {"cpp.enable_floating_point_contract_flag": "fast"}
    # Without it fused kernels keep half precision values in float32, and other tokens win.
    return {"emulate_precision_casts": True}


def _exported(selector: Selector, dtype: str, device: str) -> ExportedProgram:
    """Trace the selection once with every size free."""
    program = BestRows(selector).eval()
    embeds_sizes = {0: Dim.DYNAMIC(min=2), 1: Dim.DYNAMIC, 2: Dim.DYNAMIC(min=4, max=MAX_WIDTH)}
    sizes = (embeds_sizes, {0: Dim.DYNAMIC})
    return torch.export.export(program, _example(dtype, device), dynamic_shapes=sizes, strict=False)


def _example(dtype: str, device: str) -> tuple[Tensor, Tensor]:
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype '{dtype}': expected one of {', '.join(sorted(DTYPES))}.")
    generator = torch.Generator().manual_seed(0)
    embeds_TND = torch.randn(EXAMPLE_TND, generator=generator).to(device, DTYPES[dtype])
    share_K = torch.full((EXAMPLE_K,), EXAMPLE_K / (EXAMPLE_TND[0] * EXAMPLE_TND[1]), device=device)
    return embeds_TND, share_K


@contextmanager
def _quiet_torch() -> Iterator[None]:
    # The exporter warns about torchvision's absence at every call; nothing here uses torchvision.
    noisy = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch's own use of its tree library.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        noisy.setLevel(level)
