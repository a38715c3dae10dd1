"""The shape that every tower has: begin, blocks, finish, and perhaps outputs that leave between blocks.

Parity taps and per-block checks use these stages, so a recipe writes no `forward` of its own.
In half precision, parts whose numbers float16 cannot represent stay float32, each named by its module:
`blocks.3.mlp` computes in float32 with float32 weights; `blocks.3` keeps the residual rows of that block and
of all after it in float32, while its projections stay half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from vlexport.errors import UnsupportedError
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.blocks import SwiGLU

WIDE = "float32"


class Tower(nn.Module):
    """Patches and tables to outputs by name; `connectors` are modules that make tokens of rows of blocks."""

    connectors: ClassVar[tuple[str, ...]] = ()

    def ready(self) -> Self:
        return self.eval()


class StagedTower(Tower):
    """A tower whose blocks share one layout; subclasses write `begin` and `finish`.

    levels  outputs that leave after a block, by name with the block's number; `level` computes them
    """

    blocks: nn.ModuleList
    levels: Mapping[str, int] = MappingProxyType({})
    connectors: ClassVar[tuple[str, ...]] = ("merger",)

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        raise TypeError(f"{type(self).__name__} has no begin()")

    def level(self, name: str, x: Tensor, layout: CallLayout) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no level()")

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        raise TypeError(f"{type(self).__name__} has no finish()")

    def ready(self) -> Self:
        for layer in self.modules():
            if isinstance(layer, SwiGLU):
                layer.align()
        return super().ready()

    def levels_after(self, index: int, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        return {name: self.level(name, x, layout) for name, at in self.levels.items() if at == index}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, layout = self.begin(inputs)
        levels: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, layout)
            levels |= self.levels_after(index, x, layout)
        return {**self.finish(x, layout), **levels}


class Typed(nn.Module):
    """A module that computes in one dtype among others: rows are cast on the way in and on the way out."""

    def __init__(self, module: nn.Module, inner: torch.dtype, outer: torch.dtype) -> None:
        super().__init__()
        self.module, self.inner, self.outer = module, inner, outer

    def forward(self, *arguments: object) -> Tensor:
        # Layouts come as something else than a tensor, and keeps its types.
        typed = [
            value.to(self.inner) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in arguments
        ]
        result: Tensor = self.module(*typed)
        return result.to(self.outer)


def projections(tower: nn.Module) -> list[str]:
    """Return modules that can be typed by themselves: the largest with matrices and without a norm inside."""
    return list(_below(tower, ""))


def _below(module: nn.Module, name: str) -> Iterator[str]:
    if name and _has_matrix(module) and not any(_is_norm(part) for part in module.modules()):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _below(child, f"{name}.{child_name}" if name else child_name)


def _has_matrix(module: nn.Module) -> bool:
    return any(weight.ndim > 1 for weight in module.parameters())


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and not _has_matrix(module)


def block_of(name: str) -> int | None:
    """Return the number of the block that a module is or belongs to."""
    words = name.split(".")
    return int(words[1]) if words[0] == "blocks" and len(words) > 1 else None


def with_fp32_layers(tower: nn.Module, dtype: str, fp32_layers: Iterable[str]) -> nn.Module:
    """Cast a float32 tower to `dtype` in place, but for the float32 layers."""
    layers, modules = set(fp32_layers), projections(tower)
    if not isinstance(tower, StagedTower):
        raise UnsupportedError(
            f"a tower of type {type(tower).__name__}: a StagedTower is expected where parts stay float32. "
            "Derive it from vlexport.vision.tower.StagedTower."
        )
    named = [*modules, *(f"blocks.{index}" for index in range(len(tower.blocks)))]
    if layers - set(named):
        raise UnsupportedError(
            f"no parts named {', '.join(sorted(layers - set(named)))} in the tower. "
            f"It has: {', '.join(named)}."
        )
    starts = [block_of(name) for name in layers if name not in modules]
    first = min((index for index in starts if index is not None), default=len(tower.blocks))
    half: torch.dtype = getattr(torch, dtype)
    kept = {id(weight) for name in layers & set(modules) for weight in tower.get_submodule(name).parameters()}
    for weight in tower.parameters():
        if id(weight) not in kept:
            weight.data = weight.data.to(half)
    if not layers:
        return tower
    for name, place in _places(modules, len(tower.blocks)).items():
        # The last place is behind the blocks: outputs are half again.
        outer = torch.float32 if first <= place < len(tower.blocks) else half
        parent, _, last = name.rpartition(".")
        inner = torch.float32 if name in layers else half
        setattr(tower.get_submodule(parent), last, Typed(tower.get_submodule(name), inner, outer))
    if first < len(tower.blocks):
        tower.blocks[first] = Typed(tower.blocks[first], torch.float32, torch.float32)
    return tower


def _places(modules: Sequence[str], depth: int) -> dict[str, int]:
    places: dict[str, int] = {}
    place = 0
    for name in modules:
        index = block_of(name)
        place = index if index is not None else (depth if places and place == depth - 1 else place)
        places[name] = place
    return places
