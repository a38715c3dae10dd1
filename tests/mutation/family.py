"""Bugs planted in the recipe of a family."""

from __future__ import annotations

from tests.mutation.mutant import RECIPE, Mutant


def _recipe(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file=RECIPE, old=old, new=new)


def _tower(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/grid_tower.py", old=old, new=new)


def _library(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind="order", file=f"vision/{file}.py", old=old, new=new)


# The end of the method that makes a loaded tower ready.
_END = "        return self.eval()"


def _weights(name: str, kind: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/tower.py", old=_END, new=f"{new}\n{_END}")


FAMILY = (
    _tower(
        "output left in window order",
        "order",
        "self.merger(x).index_select(0, layout.inverse_M)",
        "self.merger(x)",
    ),
    _tower(
        "output ordered twice",
        "order",
        "self.merger(x).index_select(0, layout.inverse_M)",
        "self.merger(x).index_select(0, layout.order_M)",
    ),
    _recipe(
        "full attention one block late",
        "masks",
        "index in config.full_blocks",
        "index - 1 in config.full_blocks",
    ),
    _recipe("every block attends in windows", "masks", "index in config.full_blocks", "index < 0"),
    _recipe(
        "windows one cell larger",
        "windows",
        "config.window_size // rule.merge // rule.patch",
        "config.window_size // rule.merge // rule.patch + 1",
    ),
    _recipe(
        "windows measured in patches",
        "windows",
        "config.window_size // rule.merge // rule.patch",
        "config.window_size // rule.patch",
    ),
    _recipe(
        "another rotary base",
        "positions",
        "theta=config.rope_theta",
        "theta=10.0 * config.rope_theta",
    ),
    _recipe("epsilon of another norm", "arithmetic", "NORM_EPS = 1e-6", "NORM_EPS = 1e-5"),
    _library(
        "items joined in reverse",
        "attention/packing",
        "torch.cat([item.patches for item in media])",
        "torch.cat([item.patches for item in media[::-1]])",
    ),
    _library(
        "grids read in reverse",
        "grid_packing",
        "torch.tensor([item.grid for item in media], dtype",
        "torch.tensor([item.grid for item in media[::-1]], dtype",
    ),
    _library(
        "tokens counted per row",
        "attention/packing",
        "item.grid[2] // self.unit",
        "item.grid[2] // self.merge",
    ),
    _recipe(
        "default full blocks for the checkpoint's",
        "masks",
        '"fullatt_block_indexes"',
        '"full_attention_block_indexes"',
    ),
    _weights(
        "weights rounded to bfloat16",
        "types",
        "        for each in self.parameters():\n            each.data = each.data.bfloat16().to(each.dtype)",
    ),
    _weights(
        "weights of another seed",
        "arithmetic",
        "        self.blocks[0].mlp.up_proj.weight.data.normal_(std=0.1)",
    ),
    _weights(
        "weights of two blocks exchanged",
        "order",
        "        one, other = self.blocks[0], self.blocks[-1]\n"
        "        one.mlp, other.mlp = other.mlp, one.mlp",
    ),
)
