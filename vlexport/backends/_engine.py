"""Engines: each call is checked before a library sees it, and what a library raises is translated."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Self

from vlexport.backends.base import EngineSpec, Runner
from vlexport.errors import UNEXPECTED, BundleError, InputError, ResourceError, VlexportError
from vlexport.specs import Symbol, TensorSpec, bind, check_within, size_of
from vlexport.system import shortage

if TYPE_CHECKING:
    from torch import Tensor

# Values of inputs up to which a library keeps what a call took, 3,567 patches of 1,176 columns. In ONNX
# Runtime that is 280 MB at most: small calls are a tenth faster for it, large ones not. OpenVINO would keep
# what its largest call needed, for every call after it.
KEPT_VALUES = 2**22
CLOSED = "this engine is closed; open the bundle again."
DAMAGED = (
    "Its files are those of the manifest: they were damaged before, or are for another version. Build the "
    "bundle again or fetch an intact copy."
)
# Instructions for products of 8 bits, in two encodings; without them two products are added in 16 bits.
VNNI, ENCODINGS = "vnni", ("avx512_vnni", "avx_vnni")
# Of an archive, and of the pickles in it.
ARCHIVE_ERRORS = (EOFError, zipfile.BadZipFile, zlib.error, pickle.PickleError)


class FunctionRunner(Runner):
    """A function of torch, such as a module, in the place of a library."""

    def __init__(self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self.function = function

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        with torch.inference_mode():
            return self.function(dict(tensors))


class Engine:
    """A loaded engine that checks names, types, shapes and profile before each call of its library.

    Any thread may call it; calls wait for each other unless the runner is reentrant. It belongs to the
    process that opened it.

    begin   opens the runner, at the first call and again after `release`
    device  the GPU of several that is torch's current device in its calls
    """

    def __init__(
        self,
        runner: Runner | None,
        spec: EngineSpec,
        *,
        begin: Callable[[], Runner] | None = None,
        device: int | None = None,
    ) -> None:
        self._runner, self._begin, self._device = runner, begin, device
        self.spec, self.inputs, self.outputs = spec, spec.inputs, spec.outputs
        self._process = os.getpid()
        shared = runner is not None and runner.reentrant
        self._turn: AbstractContextManager[object] = nullcontext() if shared else Lock()

    @property
    def budgets(self) -> tuple[int, ...]:
        """Token counts that calls are padded to; empty where every size runs as it is."""
        return self._runner.budgets if self._runner else ()

    def warm_up(self) -> None:
        if self._runner:
            with self._on_device():
                self._runner.warm_up()

    def release(self) -> None:
        if self._begin is not None:
            self._drop()

    def reopen(self) -> None:
        with self._turn:
            if self._begin is not None:
                self._opened()

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.require_own_process()
        values = bind(self.spec.inputs, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for spec in self.spec.inputs:
            dtype = str(tensors[spec.name].dtype).removeprefix("torch.")
            if dtype != spec.dtype:
                raise InputError(f"{spec.name}: {dtype} given, {spec.dtype} expected.")
        check_within(self.spec.profile, values)
        chosen = {spec.name: tensors[spec.name] for spec in self.spec.inputs}
        with self._turn, self._on_device():
            outputs = self._opened().run(chosen)
        _check_outputs(self.spec.outputs, outputs, values)
        return outputs

    def require_own_process(self) -> None:
        """Refuse a closed engine, and a process that a fork made: threads of libraries do not survive one."""
        if os.getpid() != self._process:
            raise InputError(
                f"this engine was opened in process {self._process} and is used in process {os.getpid()}, "
                "which was forked from it. Open the bundle in each process, best one started by 'spawn'."
            )
        if self._runner is None and self._begin is None:
            raise InputError(CLOSED)

    def close(self) -> None:
        if os.getpid() == self._process:
            self._begin = None
            self._drop()

    def _opened(self) -> Runner:
        if self._runner is None and self._begin is not None:
            self._runner = self._begin()
        if self._runner is None:
            raise InputError(CLOSED)
        return self._runner

    def _drop(self) -> None:
        with self._turn:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _on_device(self) -> AbstractContextManager[object]:
        if self._device is None:
            return nullcontext()
        import torch

        return torch.cuda.device(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_outputs(
    specs: Sequence[TensorSpec], outputs: Mapping[str, Tensor], values: Mapping[Symbol, int]
) -> None:
    for spec in specs:
        tensor = outputs.get(spec.name)
        shape = [size_of(dim, values) for dim in spec.shape]
        actual = None if tensor is None else (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if actual is None or actual[0] != spec.dtype or not _fits(shape, actual[1]):
            raise BundleError(
                f"the engine gave {actual or 'nothing'} as '{spec.name}'; {spec.dtype} {shape} is in its "
                "manifest. Build the bundle again or fetch an intact copy."
            )


def _fits(shape: Sequence[int | None], sizes: Sequence[int]) -> bool:
    pairs = zip(shape, sizes, strict=False)
    return len(shape) == len(sizes) and all(expected in (None, size) for expected, size in pairs)


@contextmanager
def refused_by(
    library: str, *families: type[Exception], tensors: Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """Raise a `BundleError` in place of what a library raises about an engine whose inputs are in order.

    `families` are the library's own; the others come from Python and torch. Lack of memory in a call with
    these tensors is a `ResourceError`; elsewhere it passes unchanged.
    """
    kinds: tuple[type[Exception], ...] = (*UNEXPECTED, *ARCHIVE_ERRORS, *families)
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in (tensors or {}).items())
    try:
        yield
    except InputError as error:
        # Inputs were checked before, so what is refused are the engine's own files.
        raise BundleError(f"{library} does not run this engine ({error}) {DAMAGED}") from error
    except (VlexportError, MemoryError):
        raise
    except kinds as error:
        words, place = " ".join(str(error).split())[:400], f" at {shapes}" if shapes else ""
        if isinstance(error, OSError) and shortage(error) is not None:
            # Of the machine, not of the files; it is explained by who knows the place.
            raise
        if any(word in str(error).lower() for word in ("alloc", "out of memory", "no space")):
            if not shapes:
                raise
            raise ResourceError(
                f"out of memory in {library}{place} ({words}). Send fewer items at once."
            ) from error
        raise BundleError(
            f"{library} does not run this engine{place} ({type(error).__name__}: {words}). {DAMAGED}"
        ) from error


def is_large(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a library has to give back what it took for a call; values count, of any type."""
    return sum(tensor.numel() for tensor in tensors.values()) > KEPT_VALUES


def has_vnni() -> bool:
    import torch

    return any(torch.cpu.get_capabilities().get(name) for name in ENCODINGS)
