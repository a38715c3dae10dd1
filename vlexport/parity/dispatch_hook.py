"""Looking on while a tower runs in torch: every operation, with what it was given and what it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchHook(TorchDispatchMode):
    """A mode that changes nothing; subclasses write `saw`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").split(".")[0]
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.saw(name, args, made)
        return result

    def saw(self, name: str, args: Sequence[Any], made: Tensor) -> None:
        """Take note of an operation that was given `args` and made a tensor."""
        raise TypeError(f"{type(self).__name__} has no saw()")
