"""Bugs planted in the recipe of a family."""

from __future__ import annotations

from vlexport.parity.mutants.mutant import RECIPE, Mutant


def _recipe(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file=RECIPE, old=old, new=new)


# The end of the function that gives the tower its weights.
_END = "    return module.eval()\n\n\ndef weight_names"

FAMILY = (
    _recipe(
        "output left in window order",
        "order",
        "self.merger(x).index_select(0, layout.inverse_M)",
        "self.merger(x)",
    ),
    _recipe(
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
        "self.window_size // self.merge // self.rule.patch",
        "self.window_size // self.merge // self.rule.patch + 1",
    ),
    _recipe(
        "windows measured in patches",
        "windows",
        "self.window_size // self.merge // self.rule.patch",
        "self.window_size // self.rule.patch",
    ),
    _recipe(
        "another rotary base",
        "positions",
        "config.width // config.heads, config.rope_theta",
        "config.width // config.heads, 10.0 * config.rope_theta",
    ),
    _recipe("epsilon of another norm", "arithmetic", "NORM_EPS = 1e-6", "NORM_EPS = 1e-5"),
    _recipe(
        "items joined in reverse",
        "order",
        "torch.cat([item.patches for item in media])",
        "torch.cat([item.patches for item in media[::-1]])",
    ),
    _recipe(
        "grids read in reverse",
        "order",
        "torch.tensor([item.grid for item in media], dtype",
        "torch.tensor([item.grid for item in media[::-1]], dtype",
    ),
    _recipe(
        "tokens counted per row",
        "order",
        "rows * columns // config.merge**2",
        "rows * columns // config.merge",
    ),
    _recipe(
        "default full blocks for the checkpoint's",
        "masks",
        '"fullatt_block_indexes"',
        '"full_attention_block_indexes"',
    ),
    _recipe(
        "weights rounded to bfloat16",
        "types",
        _END,
        "    for each in module.parameters():\n        each.data = each.data.bfloat16().to(each.dtype)\n"
        + _END,
    ),
    _recipe(
        "weights of another seed",
        "arithmetic",
        _END,
        "    module.blocks[0].mlp.up_proj.weight.data.normal_(std=0.1)\n" + _END,
    ),
    _recipe(
        "weights of two blocks exchanged",
        "order",
        _END,
        "    one, other = module.blocks[0], module.blocks[-1]\n    one.mlp, other.mlp = other.mlp, one.mlp\n"
        + _END,
    ),
)
