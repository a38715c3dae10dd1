"""MiniCPM-V 2.0, 2.5, 2.6, 4.0 and 4.5: image slices through a SigLIP tower, then learned queries.

Releases differ in values of `Variant`, chosen once by version; audio and speech parts are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint, ConfigView
from vlexport.errors import InputError, UnknownModelError
from vlexport.language import LanguageRule, PromptItem, PromptRule, folded_scales, known_text_model
from vlexport.recipe import Limit, Recipe, Reference
from vlexport.specs import NAMED_BOUNDS, MediaBounds, MediaItem, Pixels, ShapeProfile
from vlexport.vision import slice_shapes, slice_tables
from vlexport.vision.one_by_one import loaded
from vlexport.vision.slice_prompts import MARKERS, SLOT, SliceWords, video_text
from vlexport.vision.slice_shapes import capture_sizes as captures
from vlexport.vision.slice_tower import SliceTower, TowerSizes, call_tables
from vlexport.vision.slices import SliceRule, cut_of, to_slices

HEAD_WIDTH = 128  # of the resampler, in every release
Names = tuple[tuple[str, str], ...]
EARLY_WORDS = SliceWords(numbered=False, cells_apart=False)
LATER_WORDS = SliceWords(numbered=True, cells_apart=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What changed between releases; the fields without a word here are those of `TowerSizes`.

    names    how parts of a tensor's name here are called in the checkpoint, replaced in this order
    ignored  parts below `vpm.` that are never read
    decoder  the type of the language model in transformers
    scaled   the decoder scales embeddings, branches and logits, which that type does not
    words    how images stand in a prompt
    """

    learned_tables: bool = False
    grid_in_tower: bool = True
    frame_times: bool = False
    videos: bool = True
    names: Names = (
        ("embed.", "embeddings.patch_embedding."), ("positions", "embeddings.position_embedding.weight"),
        ("blocks.", "encoder.layers."), ("norm1.", "layer_norm1."), ("norm2.", "layer_norm2."),
        (".attn.", ".self_attn."), ("norm.", "post_layernorm."),
    )  # fmt: skip
    ignored: tuple[str, ...] = ("head.",)
    decoder: str = "llama"
    scaled: bool = False
    words: SliceWords = LATER_WORDS


VARIANTS = {
    "2.0": Variant(
        learned_tables=True, videos=False, scaled=True, words=EARLY_WORDS, ignored=("attn_pool.", "head."),
        names=(("embed.", "patch_embed.proj."), ("positions", "pos_embed")),
    ),
    "2.5": Variant(grid_in_tower=False, videos=False, words=EARLY_WORDS),
    "2.6": Variant(decoder="qwen2"),
    "4.0": Variant(),
    "4.5": Variant(frame_times=True, decoder="qwen3"),
}
# 2.0 names its tower (vit_so400m_patch14_siglip_384 of timm) instead of describing it.
NAMED_TOWER: Mapping[str, object] = {
    "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16,
    "intermediate_size": 4304, "image_size": 384, "patch_size": 14,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The numbers of config.json and preprocessor_config.json that shape graph and inputs.

    `depth` counts the layers that a checkpoint may hold; `tower.depth` those that run.
    """

    version: str
    depth: int
    tower: TowerSizes
    cut: SliceRule

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.version]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def parse_config(values: Mapping[str, Any]) -> Config:
    """Read back what `Config.to_json` wrote."""
    parts = {"cut": SliceRule.from_json(values["cut"]), "tower": TowerSizes(**values["tower"])}
    return Config(**{**values, **parts})


def version_of(view: ConfigView) -> str:
    """The release; early checkpoints do not say theirs and are told apart by two sizes."""
    if (given := dict(view.items()).get("version")) is None:
        sizes = (view.get_int("hidden_size", 0), view.get_int("query_num", 0))
        return "2.0" if sizes == (2304, 64) else "2.5"
    version = str(given) if "." in str(given) else f"{given}.0"
    if version not in VARIANTS:
        raise UnknownModelError(
            f"{view.file}: 'version' is {given!r}; this recipe serves {', '.join(sorted(VARIANTS))}. "
            "Other releases need a recipe of their own, see recipes/README.md."
        )
    return version


def read_config(checkpoint: Checkpoint) -> Config:
    view = checkpoint.view
    version = version_of(view)
    variant = VARIANTS[version]
    defaults = NAMED_TOWER if variant.learned_tables else {}
    given = dict(view.section("vision_config").items()) if view.has("vision_config") else {}
    vision = ConfigView(values={**defaults, **given}, file=view.file, at="vision_config.")
    depth, patch = vision.require_int("num_hidden_layers"), vision.require_int("patch_size")
    out_width = view.require_int("hidden_size")
    tower = TowerSizes(
        depth=depth - view.get_bool("drop_vision_last_layer", False),
        width=vision.require_int("hidden_size"),
        heads=vision.require_int("num_attention_heads"),
        inner=vision.require_int("intermediate_size"),
        patch=patch,
        side=vision.require_int("image_size") // patch,
        eps=vision.get_float("layer_norm_eps", 1e-6),
        queries=view.require_int("query_num"),
        out_width=out_width,
        out_heads=max(1, out_width // HEAD_WIDTH),
        learned_tables=variant.learned_tables,
        grid_in_tower=variant.grid_in_tower,
        frame_times=variant.frame_times,
    )
    return Config(version=version, depth=depth, tower=tower, cut=slice_rule(checkpoint, patch))


def slice_rule(checkpoint: Checkpoint, patch: int) -> SliceRule:
    """Settings of the image processor; those of config.json where it has no file of its own."""
    view = checkpoint.view
    if checkpoint.has_file("preprocessor_config.json"):
        view = checkpoint.image_processor()
    elif view.has("slice_config"):
        view = view.section("slice_config")
    half = (0.5, 0.5, 0.5)
    return SliceRule(
        patch=patch,
        side=view.get_int("scale_resolution", 448),
        max_cells=view.get_int("max_slice_nums", 9) if view.get_bool("slice_mode", True) else 1,
        mean=view.get_floats("norm_mean", view.get_floats("image_mean", half)),
        std=view.get_floats("norm_std", view.get_floats("image_std", half)),
    )


def weight_names(checkpoint: Checkpoint, config: Config) -> Mapping[str, str]:
    """The tower's tensors: name in the tower -> name in the checkpoint."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in SliceTower(config.tower).state_dict().items()}
    ours = {stored_name(name, config.variant.names): name for name in shapes}
    found: dict[str, str] = {}
    for prefix, ignore in (("vpm.", ignored(config)), ("resampler.", ())):
        expected = {
            name.removeprefix(prefix): shapes[our] for name, our in ours.items() if name.startswith(prefix)
        }
        stored = checkpoint.check_names(expected, prefix, ignore=ignore)
        found |= {ours[prefix + name]: where for name, where in stored.items()}
    return {name: found[name] for name in shapes}


def stored_name(name: str, names: Names) -> str:
    if name.startswith("resampler."):
        return name
    for ours, theirs in names:
        name = name.replace(ours, theirs)
    return f"vpm.{name}"


def ignored(config: Config) -> tuple[str, ...]:
    """Beginnings of names below `vpm.` that no release runs, with a last layer that this one drops."""
    dropped = stored_name(f"blocks.{config.tower.depth}.", config.variant.names).removeprefix("vpm.")
    return (*config.variant.ignored, *((dropped,) if config.tower.depth < config.depth else ()))


def tower(checkpoint: Checkpoint, dtype: str, form: str) -> nn.Module:
    """The tower with the checkpoint's weights."""
    config = read_config(checkpoint)
    with torch.device("meta"):
        module = SliceTower(config.tower, form)
    weights = checkpoint.tensors(weight_names(checkpoint, config), dtype=dtype)
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.eval()


def preprocess(config: Config, pixels: Pixels) -> MediaItem:
    if pixels.kind == "video" and not config.variant.videos:
        raise InputError(
            f"a video given, but release {config.version} takes images only. Pass its frames as images."
        )
    return to_slices(config.cut, pixels)


def prepare(config: Config, media: Sequence[MediaItem], form: str) -> dict[str, Tensor]:
    """All engine inputs of a call, from the items' patches, slices and frame numbers alone."""
    slice_tables.check_items(media, config.cut.row_width, timed=config.variant.frame_times)
    patches = torch.cat([item.patches for item in media]) if len(media) > 1 else media[0].patches
    return {"patches": patches, **call_tables(media, config.tower, form)}


def num_tokens(config: Config, item: MediaItem) -> int:
    return slice_tables.num_groups(item) * config.tower.queries


def profile_from(config: Config, name: str, bounds: MediaBounds) -> ShapeProfile:
    return slice_shapes.bounded(name, bounds, config.cut)


def profiles(config: Config) -> Mapping[str, ShapeProfile]:
    named = {name: profile_from(config, name, bounds) for name, bounds in NAMED_BOUNDS.items()}
    return {"any": slice_shapes.any_mix(), **named}


def reference(checkpoint: Checkpoint) -> Reference:
    """The tower of transformers and the attention of torch with the same weights, nothing packed."""
    config = read_config(checkpoint)
    weights = checkpoint.tensors(weight_names(checkpoint, config), dtype="float32")
    return loaded(config.tower, weights, lambda name: stored_name(name, Variant().names))


def text_model(checkpoint: Checkpoint) -> nn.Module:
    return known_text_model(checkpoint, VARIANTS[version_of(checkpoint.view)].decoder)


def decoder_scales(checkpoint: Checkpoint) -> Mapping[str, float]:
    """Factors of the oldest decoder: of embeddings, of what each branch adds, of the output layer."""
    view = checkpoint.view
    if not VARIANTS[version_of(view)].scaled:
        return {}
    branch = view.require_float("scale_depth") / view.require_int("num_hidden_layers") ** 0.5
    logits = view.require_int("dim_model_base") / view.require_int("hidden_size")
    return folded_scales(embeds=view.require_float("scale_emb"), branches=branch, logits=logits)


def expand(config: Config, item: PromptItem) -> str:
    queries = config.tower.queries
    if item.kind == "video":
        return video_text(item.num_rows // queries, queries)
    return config.variant.words.image(item.number, cut_of(item.item), queries)


LANGUAGE: LanguageRule[Config] = LanguageRule(
    build=text_model,
    prefixes=("llm.model.",),
    heads=("llm.lm_head.weight",),
    scales=decoder_scales,
    prompt=PromptRule(markers=MARKERS, slots=dict.fromkeys(MARKERS, SLOT), expand=expand, content="text"),
)
ORIGIN = "parity.md 5: fp32 starting gate; ours and the reference differ by 4.4e-6 at depth 3"
DEEP = "1.5 x the noise of the reference itself on random towers of 27 layers: off by"

RECIPE = Recipe(
    name="minicpmv",
    summary="MiniCPM-V 2.0 to 4.5 and MiniCPM-o: slices of any grids, a fixed number of tokens for each",
    model_types=("minicpmv", "minicpmo"),
    read_config=read_config,
    parse_config=parse_config,
    weight_names=weight_names,
    tower=tower,
    preprocess=preprocess,
    prepare=prepare,
    axes=lambda config, form: slice_shapes.table_axes(config.tower.queries, form),
    profiles=profiles,
    profile_from=profile_from,
    outputs=("embeds",),
    row_width=lambda config: config.cut.row_width,
    merge=lambda config: 1,
    num_tokens=num_tokens,
    attention_work=lambda config, media, form: slice_shapes.score_counts(media, config.tower.queries, form),
    shape_sets=lambda config: slice_shapes.revealing_mixes(config.tower.side, videos=config.variant.videos),
    frame_groups=lambda config, kind, grid: (
        slice_shapes.by_threes(grid[0]) if config.variant.frame_times and kind == "video" else ()
    ),
    reference=reference,
    forms=("runs", "rows", "bounds"),
    capture_sizes=lambda config, budget, frames: captures(config.cut, budget // config.tower.queries, frames),
    position_rule="linear",
    pruning_rule=None,
    frames_apart=True,
    language=LANGUAGE,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.2, worst_token=0.6, origin=f"{DEEP} 0.13, one token by 0.41"),
        "float16": Limit(relative_l2=0.03, worst_token=0.05, origin=f"{DEEP} 0.02, one token by 0.032"),
    },
)
