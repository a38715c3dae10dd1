"""Bugs planted in the arithmetic of sliced towers: places, layers, resampler."""

from __future__ import annotations

from tests.mutation.mutant import RECIPE, Mutant
from tests.mutation.slicing import LEARNED, LINE, SLICES, TIMES


def _tower(name: str, kind: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    return Mutant(name=f"slices: {name}", kind=kind, file=RECIPE, old=old, new=new, trial=trial)


TOWER = (
    _tower(
        "answers in the order of the blocks",
        "order",
        'layout.results(tokens, "group", self.sizes.queries)',
        "tokens",
    ),
    _tower("no last norm", "arithmetic", "self.resampler(self.norm(x),", "self.resampler(x,"),
    _tower(
        "places of the table in reverse",
        "positions",
        "table_BC.index_select(0,",
        "table_BC.flip(0).index_select(0,",
    ),
    _tower(
        "grid of a slice not used",
        "positions",
        "(cell_N2, sides_N2) if sizes.grid_in_tower else",
        "(cell_N2, sides_N2) if not sizes else",
    ),
    _tower(
        "grid of a slice used",
        "positions",
        "(cell_N2, sides_N2) if sizes.grid_in_tower else",
        "(cell_N2, sides_N2) if sizes else",
        LINE,
    ),
    _tower(
        "no times",
        "positions",
        "        if self.sizes.frame_times:",
        "        if self.sizes.frame_times is None:",
        TIMES,
    ),
    _tower(
        "tower's table resized without antialias",
        "positions",
        "sizes.side, antialias=True",
        "sizes.side, antialias=False",
        LEARNED,
    ),
    _tower(
        "resampler's table resized with antialias",
        "positions",
        "sizes.query_side, antialias=False",
        "sizes.query_side, antialias=True",
        LEARNED,
    ),
    _tower(
        "resampler's table one too large",
        "positions",
        "return math.isqrt(self.queries)",
        "return math.isqrt(self.queries) + 1",
        LEARNED,
    ),
    _tower("tanh for exact gelu", "arithmetic", "exact=sizes.learned_tables", "exact=False", LEARNED),
    _tower("exact for tanh gelu", "arithmetic", "exact=sizes.learned_tables", "exact=True"),
)


FORMS = (
    Mutant(
        name="slices: keys of another group are seen",
        kind="masks",
        file="vision/attention/grouped.py",
        old="columns.insert(1, torch.full_like(count_R, kind.queries))",
        new="columns = [count_R // count_R, count_R * kind.queries, count_R * length_R]",
        trial=SLICES,
    ),
    Mutant(
        name="slices: results of buckets in the order of the blocks",
        kind="order",
        file="vision/attention/padded.py",
        old="row_F[cut.rank_S]",
        new="row_F",
        trial=SLICES,
    ),
    Mutant(
        name="slices: groups cut like slices",
        kind="masks",
        file=RECIPE,
        old="[sum(each.length for each in group) for group in groups]",
        new="[each.length for group in groups for each in group]",
        trial=TIMES,
    ),
)


def _resampler(name: str, kind: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    file = "vision/resampler.py"
    return Mutant(name=f"slices: {name}", kind=kind, file=file, old=old, new=new, trial=trial)


RESAMPLER = (
    _resampler(
        "keys have no places", "positions", "values_NE + positions_NE.to(values_NE.dtype)", "values_NE"
    ),
    _resampler("values have places", "positions", "keys_NE, values_NE, groups)", "keys_NE, keys_NE, groups)"),
    _resampler("queries have no places", "positions", "query_QE + self.pos_embed", "query_QE", LEARNED),
    _resampler("norm of queries left out", "arithmetic", "self.ln_q(self.query)", "self.query"),
    _resampler("another epsilon", "arithmetic", "EPS = 1e-6", "EPS = 1e-5"),
    _resampler("last matrix transposed", "arithmetic", "@ self.proj\n", "@ self.proj.T\n"),
    _resampler("scale of the whole width", "arithmetic", "(width // heads) ** -0.5", "width**-0.5"),
    _resampler(
        "keys and values exchanged",
        "arithmetic",
        "zip((query_QE, keys_NE, values_NE)",
        "zip((query_QE, values_NE, keys_NE)",
    ),
    _resampler("row's half first", "positions", "[column_NE, row_NE]", "[row_NE, column_NE]"),
    _resampler(
        "places end with a table of 70",
        "positions",
        "_waves(cell_N2[:, axis],",
        "_waves(cell_N2[:, axis].clamp(max=69),",
    ),
    _resampler(
        "frequencies over the whole width",
        "positions",
        "dtype=torch.float32) / half)",
        "dtype=torch.float32) / width)",
    ),
    _resampler(
        "places rounded to bfloat16",
        "types",
        "place_N.float()[:, None]",
        "place_N.bfloat16().float()[:, None]",
    ),
    _resampler("cosines first", "positions", "[angle.sin(), angle.cos()]", "[angle.cos(), angle.sin()]"),
    _resampler("number 0 has no time", "positions", "(frame_N >= 0)", "(frame_N > 0)", TIMES),
    _resampler("slices without a time have one", "positions", "* (frame_N >= 0)[:, None]", "* 1.0", TIMES),
    _resampler(
        "rows and columns of a table exchanged",
        "positions",
        "rows_NB[:, :, None] * columns_NB[:, None, :]",
        "columns_NB[:, :, None] * rows_NB[:, None, :]",
        LEARNED,
    ),
)


def _layer(name: str, kind: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    file = "vision/blocks.py"
    return Mutant(name=f"slices: {name}", kind=kind, file=file, old=old, new=new, trial=trial)


LAYERS = (
    _layer(
        "patch kernel without its bias",
        "arithmetic",
        "self.weight.flatten(1), self.bias)",
        "self.weight.flatten(1))",
    ),
    _layer(
        "scale one percent off", "arithmetic", "q_NHD.shape[-1] ** -0.5)", "1.01 * q_NHD.shape[-1] ** -0.5)"
    ),
    _tower(
        "epsilon ten times as large",
        "arithmetic",
        "[LayerNorm(sizes.width, eps=sizes.eps)",
        "[LayerNorm(sizes.width, eps=10 * sizes.eps)",
    ),
    _layer("first norm used twice", "arithmetic", "self.norm2(x_NC)", "self.norm1(x_NC)"),
    _layer(
        "parts of a fused projection in another order",
        "order",
        "(3, self.heads, -1)).unbind(1)",
        "(3, self.heads, -1)).unbind(1)[::-1]",
        LEARNED,
    ),
    _layer(
        "residual stream rounded to bfloat16",
        "types",
        "= x_NC + self.mlp(",
        "= x_NC.bfloat16().to(x_NC.dtype) + self.mlp(",
    ),
)

SLICED_TOWERS = (*TOWER, *FORMS, *RESAMPLER, *LAYERS)
