"""Any other model type: transformers' own vision class, traced whole; whole models answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from vlexport.checkpoint import Checkpoint
from vlexport.codec import JsonObject
from vlexport.recipe import Limit, Recipe
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.features.calls import ATTENTION
from vlexport.vision.features.classes import feature_class, keep_only, stored_names, vision_model
from vlexport.vision.features.packing import ImagePacking, PicturePacking, PooledPacking, TablePacking
from vlexport.vision.features.pixels import ImageRule, PictureRule, Processor, per_frame, to_item
from vlexport.vision.features.stock import StockFeatures
from vlexport.vision.features.tower import PATCHES, PICTURE, PLAIN, STRIP, FeatureTower, examined
from vlexport.vision.position_tables import Table
from vlexport.vision.preprocess import PatchRule, by_volume

PREFIX = "features."
# Processors whose bounds of an area are those of a frame, and of several frames together.
AREA, VOLUME = "Qwen2VLImageProcessor", ("Glm4vImageProcessor", "Glm46VImageProcessor")
# Processors of videos whose bounds are those of all frames together.
CLIP_VOLUME = ("Qwen3VLVideoProcessor",)
UNITS = ("patch_size", "merge_size", "temporal_patch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """config.json, from which the class is made, and what a call of the class takes and gives.

    image        the processor of images; `frames` that of videos, where it makes one image of each frame
    tokens       of an image, where all images have one size
    form         what the class takes: images, patches, grids
    window_side  of attention windows, in cells
    table        the table of positions that is stretched over a frame
    weights      names of the class's tensors that features need
    """

    model_type: str
    settings: JsonObject
    image: Processor
    rule: ImageRule | PatchRule | PictureRule
    form: str
    tokens: int = 1
    window_side: int | None = None
    table: Table | None = None
    outputs: tuple[str, ...] = ("embeds",)
    weights: tuple[str, ...] = ()
    frames: Processor | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Config:
        image, video = (
            dict(view.values) for view in (checkpoint.image_processor(), checkpoint.video_processor())
        )
        processor = Processor.of(checkpoint.model_type, image)
        # Sides of patches and cells are the tower's, where the file does not contradict them.
        own = {key: value for key, value in processor.settings.items() if key in image or key not in UNITS}
        settings = {**image, **own}
        facts = examined(
            checkpoint.model_type,
            checkpoint.config,
            processor,
            per_frame(settings) if processor.name in VOLUME else settings,
            settings if video == image else video,
        )
        if isinstance(rule := facts["rule"], PatchRule):
            cell = rule.patch * rule.merge if facts["form"] == STRIP else rule.patch
            processor = processor.cut_into(dict(zip(UNITS, (cell, rule.merge, rule.temporal), strict=True)))
            if video.get("video_processor_type") in CLIP_VOLUME:
                facts["rule"] = by_volume(rule, video)
        return cls(
            model_type=checkpoint.model_type,
            settings=cast("JsonObject", checkpoint.config),
            image=processor,
            frames=Processor.of_frames(video),
            **facts,
        )


def preprocess(config: Config, pixels: Pixels) -> MediaItem:
    processors, by_area = (config.image, config.frames), config.image.name == AREA
    return to_item(config.rule, config.form, processors, pixels, by_area=by_area)


def packing(config: Config) -> ImagePacking | TablePacking:
    if isinstance(config.rule, PictureRule):
        return PicturePacking(config.rule, config.tokens, config.outputs)
    if isinstance(config.rule, ImageRule):
        return ImagePacking(config.rule, config.tokens, config.outputs)
    if config.form == PATCHES and config.table is not None:
        return PooledPacking(config.rule, config.table, config.outputs)
    return TablePacking(config.rule, config.window_side, config.table, config.outputs)


def tower(config: Config) -> FeatureTower:
    model = vision_model(config.model_type, config.settings, PLAIN if config.form == PICTURE else ATTENTION)
    keep_only(model, config.weights)
    return FeatureTower(model, packing(config), form=config.form)


def names(checkpoint: Checkpoint, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
    model = vision_model(config.model_type, config.settings, ATTENTION, meta=True)
    stored = {name: checkpoint.stored(name).shape for name in checkpoint.tensor_names()}
    return stored_names(model, shapes, stored, checkpoint.source, PREFIX)


def reference(checkpoint: Checkpoint) -> StockFeatures:
    config = Config.read(checkpoint)
    # SDPA is what our attention calls as well; a reference that rounds alike could be the tower itself.
    model = vision_model(config.model_type, config.settings, "eager")
    keep_only(model, config.weights)
    shapes = {PREFIX + name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {
        name.removeprefix(PREFIX): stored_name
        for name, stored_name in names(checkpoint, config, shapes).items()
    }
    model.load_state_dict(dict(checkpoint.tensors(stored, dtype="float32")), strict=True, assign=True)
    return StockFeatures(model, packing(config), form=config.form)


ORIGIN = "80 of 87 tiny classes on ONNX Runtime differ from themselves by at most 2.7e-6 (docs/generic.md)"
BFLOAT16_ORIGIN = "53 tiny classes in bfloat16 are off from themselves by at most 0.096, one token by 0.27"

RECIPE = Recipe(
    name="generic",
    summary="any other model type with image features in transformers",
    model_types=(),
    serves=lambda model_type: feature_class(model_type) is not None,
    config=Config,
    packing=packing,
    modules=tower,
    stored_names=names,
    preprocess=preprocess,
    reference=reference,
    pictures=lambda config: config.image,
    position_rule="linear",
    pruning_rule=None,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.15, worst_token=0.3, origin=BFLOAT16_ORIGIN),
    },
)
