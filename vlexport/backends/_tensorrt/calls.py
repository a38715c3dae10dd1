"""Calls of an engine by their shapes: buffers that stay where they are, and a CUDA graph over them.

A call of new shapes runs as it is, which warms the library up. The second one of the same shapes is captured,
and later ones are replays. What was captured from a context holds for that context alone, so each call has a
context of its own; they share scratch memory, because they run one after another.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vlexport.backends._tensorrt.api import Log
from vlexport.backends._tensorrt.gpu import CaptureError, Gpu
from vlexport.errors import VlexportError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# Calls of other shapes that are kept, and the memory of the GPU that their buffers may take.
MOST_CALLS, MOST_BYTES = 8, 2**30
# The library refuses no memory at all, even where it needs none.
LEAST_BYTES = 256


@dataclass(kw_only=True, slots=True)
class Call:
    """One set of shapes in one profile: tensors on the GPU, and pinned ones of the host that feed them."""

    context: Any
    given: Mapping[str, Tensor]
    found: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]
    replay: Callable[[], None] | None = None
    num_runs: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.given.values(), *self.found.values()))


@dataclass(kw_only=True)
class Calls:
    """Calls that are kept, the least recently used one given up first.

    create       a new context that brings no memory of its own, set to the profile of this number
    outputs      dtype of each output by name
    own_capture  whether graphs are captured here; some libraries capture by themselves
    """

    create: Callable[[int], Any]
    outputs: Mapping[str, str]
    own_capture: bool
    gpu: Gpu
    log: Log
    num_replays: int = 0
    _kept: OrderedDict[tuple[int, Shapes], Call] = field(default_factory=OrderedDict)
    _scratch: Tensor | None = None

    def run(self, profile: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs in memory of the host and of their own."""
        call = self._call(profile, tensors)
        for name, tensor in tensors.items():
            source = tensor if tensor.is_cuda else call.sent[name].copy_(tensor)
            call.given[name].copy_(source, non_blocking=True)
        self._compute(call)
        for name, tensor in call.found.items():
            call.received[name].copy_(tensor, non_blocking=True)
        self.gpu.wait()
        return {name: tensor.clone() for name, tensor in call.received.items()}

    def close(self) -> None:
        """Give up everything that lies on the GPU."""
        self._kept.clear()
        self._scratch = None

    def _compute(self, call: Call) -> None:
        if call.replay is None and call.num_runs == 1 and self._may_capture(call):
            self._capture(call)
        call.num_runs += 1
        if call.replay is None:
            self._launch(call)
        else:
            call.replay()
            self.num_replays += 1

    def _launch(self, call: Call) -> None:
        if not call.context.execute_async_v3(self.gpu.stream):
            raise VlexportError(f"TensorRT failed to run: {self.log.reason()}")

    def _may_capture(self, call: Call) -> bool:
        if not self.own_capture:
            return False
        asked = getattr(call.context, "is_stream_capturable", None)
        return asked is None or bool(asked(self.gpu.stream))

    def _capture(self, call: Call) -> None:
        """Where that fails, this call and all later ones run as they are."""
        try:
            call.replay = self.gpu.capture(partial(self._launch, call))
        except (CaptureError, VlexportError) as error:
            self.own_capture = False
            logger.warning("calls are not captured in CUDA graphs, which costs time only: %s", error)

    def _call(self, profile: int, tensors: Mapping[str, Tensor]) -> Call:
        key = (profile, tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))
        known = self._kept.get(key) or self._prepare(profile, tensors)
        self._kept[key] = known
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and self._too_much():
            self._kept.popitem(last=False)
        return known

    def _too_much(self) -> bool:
        taken = sum(call.num_bytes for call in self._kept.values())
        return len(self._kept) > MOST_CALLS or taken > MOST_BYTES

    def _prepare(self, profile: int, tensors: Mapping[str, Tensor]) -> Call:
        context = self.create(profile)
        for name, tensor in tensors.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise VlexportError(
                    f"TensorRT refuses {name} of {list(tensor.shape)}, which its profile holds: "
                    f"{self.log.reason()}"
                )
        self._lend(context)
        sizes = {name: (tuple(each.shape), _dtype(each)) for name, each in tensors.items()}
        results = {
            name: (tuple(context.get_tensor_shape(name)), dtype) for name, dtype in self.outputs.items()
        }
        given = {name: self.gpu.room(*size) for name, size in sizes.items()}
        found = {name: self.gpu.room(*size) for name, size in results.items()}
        for name, tensor in (*given.items(), *found.items()):
            context.set_tensor_address(name, tensor.data_ptr())
        return Call(
            context=context,
            given=given,
            found=found,
            sent={name: self.gpu.pinned(*size) for name, size in sizes.items()},
            received={name: self.gpu.pinned(*size) for name, size in results.items()},
        )

    def _lend(self, context: Any) -> None:
        """Scratch memory for these shapes, not for the largest that the profile holds."""
        wanted = max(LEAST_BYTES, context.update_device_memory_size_for_shapes())
        if self._scratch is None or self._scratch.nbytes < wanted:
            # Graphs have the address of the old memory in them.
            self.close()
            self._scratch = self.gpu.room((wanted,), "uint8")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.nbytes)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
