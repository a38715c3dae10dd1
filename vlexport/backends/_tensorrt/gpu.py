"""The few things that running an engine asks of a GPU, through torch: memory, one stream, captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CaptureError(Exception):
    """Work that does not let itself be captured; running it as it is stays possible."""


class Gpu(Protocol):
    """Where an engine runs."""

    @property
    def stream(self) -> int: ...

    def room(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Memory of the GPU."""

    def pinned(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Memory of the host that the GPU reads and writes by itself."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What `launch` puts on the stream, as one replay; nothing of it runs yet."""

    def wait(self) -> None:
        """Until everything on the stream is done."""


class TorchGpu:
    """The first GPU that torch has."""

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.Stream()

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Copies go to the stream, behind what the caller's own stream still has to do."""
        import torch

        caller = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(caller)
            yield

    def room(self, shape: Sequence[int], dtype: str) -> Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cuda")

    def pinned(self, shape: Sequence[int], dtype: str) -> Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), pin_memory=True)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                launch()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        replay: Callable[[], None] = graph.replay
        return replay

    def wait(self) -> None:
        self._stream.synchronize()
