"""Models of vLLM whose tower is a bundle, if one is named; else they are vLLM's own.

`VERSIONS` are those that were tested. What is used of vLLM beyond its documented interface is here alone:
`visual`, the names in `READ`, `PRUNED`, `SLICED` and `SPLIT`, `use_data_parallel`, the group of the ranks,
the size of the largest image, and options that are refused.
vLLM is imported when it looks for a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError, UnsupportedError
from vlexport.integrations.vllm import architectures
from vlexport.integrations.vllm.bundle_tower import (
    KEY,
    BundleSettings,
    BundleTower,
    Ranks,
    open_tower,
    tower_prefixes,
    without,
)
from vlexport.integrations.vllm.cells import KEY as CHOICE
from vlexport.integrations.vllm.cells import PIXELS, ChoosesCells, allows_choice, choice_of
from vlexport.integrations.vllm.pruning import MediaRows, place_rows
from vlexport.positions.mrope import frame_positions, pruned_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule
from vlexport.pruning.methods import find_method
from vlexport.pruning.selectors import eager
from vlexport.runtime.encoder import EngineSession, Grid
from vlexport.specs import MediaBounds

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSIONS = ("0.32.",)
# Attributes of a tower that models and their helpers read.
READ = ("spatial_merge_size", "out_hidden_size", "input_norm", "dtype", "device")
# What models that prune call themselves, and what is read of them; with time written out, also the tokenizer.
PRUNED = (
    "_postprocess_image_embeds_evs", "_postprocess_video_embeds_evs", "recompute_mrope_positions",
    "get_mrope_input_positions", "get_language_model", "is_multimodal_pruning_enabled", "config",
)  # fmt: skip
# Parts of models that take slices, and what gives their rows.
SLICED = ("vpm", "resampler", "embed_dim", "get_vision_hidden_states")
# Parts of models whose tower takes images apart and whose projector follows it, and what calls both.
SPLIT = ("vision_tower", "multi_modal_projector", "config", "_process_image_pixels")
# Above every picture that a processor makes smaller.
ANY_PIXELS = 2**40


def __getattr__(name: str) -> type:
    if name not in architectures():
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _model(name)


@cache
def _model(architecture: str) -> type:
    stock = getattr(
        import_module(f"vllm.model_executor.models.{architectures()[architecture]}"), architecture
    )
    kind: type = WithBundle
    if "__new__" in vars(stock):
        kind = WithRelease
    elif hasattr(stock, "_process_image_pixels"):
        kind = WithProjector
    made = type(architecture, (kind, stock), {"__module__": __name__, "__doc__": stock.__doc__})
    return _choosing(made) if kind is WithBundle and _is_tested() else made


def _choosing(model: Any) -> type:
    """Give a model a processor that can be handed a choice of cells; without one it is vLLM's."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    stock = model._processor_factory  # noqa: SLF001  what the model's own class was registered with
    processor = type(stock.processor.__name__, (ChoosesCells, stock.processor), {})
    register = MULTIMODAL_REGISTRY.register_processor
    chosen: type = register(processor, info=stock.info, dummy_inputs=stock.dummy_inputs)(model)
    return chosen


class WithBundle:
    """Replaces the tower once the model is made, and leaves its weights unread."""

    visual: Any
    use_data_parallel: bool
    rows: MediaRows
    rule: PositionRule
    unit: int
    _left_out: tuple[str, ...] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.take_bundle(vllm_config)

    def take_bundle(self, vllm_config: VllmConfig) -> None:
        settings = BundleSettings.of(vllm_config.additional_config)
        model = vllm_config.model_config
        multimodal = model.multimodal_config
        if settings is None:
            if allows_choice(multimodal):
                raise UnsupportedError(
                    f"mm_processor_kwargs: {CHOICE} given, and vLLM's own tower takes whole media. Name a "
                    "bundle in additional_config, or leave it out."
                )
            return
        _check_version()
        # A model that takes no media is made without its tower, and needs no bundle either.
        if not any(map(multimodal.get_limit_per_prompt, ("image", "video"))):
            return
        _check_options(vllm_config)
        served = Checkpoint.open(model.model, revision=model.revision)
        session = open_tower(settings, served, given_bytes=self.given_bytes(multimodal))
        try:
            if multimodal.is_multimodal_pruning_enabled():
                self.prune_by(vllm_config, session)
            if allows_choice(multimodal):
                self.choose_cells(model, session)
            # Later a call that does not fit would end the engine of vLLM, not one request.
            session.require(self.largest_items(model, session, served))
            self._left_out = tower_prefixes(session, served)
            self.replace_tower(session, _ranks() if self.use_data_parallel else None)
        except BaseException:
            session.engine.close()
            raise
        # vLLM's own way to spread items over ranks reads the parameters of a tower.
        self.use_data_parallel = False

    def given_bytes(self, multimodal: Any) -> bool:
        as_bytes: bool = multimodal.mm_device_do_normalize
        return as_bytes

    def prune_by(self, vllm_config: VllmConfig, session: EngineSession) -> None:
        """Prune videos by the bundle's rule, not by vLLM's."""
        if not hasattr(self, "recompute_mrope_positions"):
            raise UnsupportedError(
                f"video_pruning_rate: vLLM prunes no videos of '{session.recipe.name}'. Leave the option out."
            )
        _check_attributes(self, PRUNED)
        _check_pruning(vllm_config, by_time=session.recipe.position_rule == "time_scaled")
        own = type(self)
        self.__class__ = type(own.__name__, (WithPruning, own), {"__doc__": own.__doc__})
        self.rows = _media_rows(self, vllm_config, session)

    def choose_cells(self, model: Any, session: EngineSession) -> None:
        """Take media of which the processor has chosen some cells."""
        multimodal, is_text = model.multimodal_config, session.recipe.position_rule == "time_as_text"
        refused = {
            f"recipe '{session.recipe.name}'": not session.packing.takes_cells,
            "video_pruning_rate": multimodal.is_multimodal_pruning_enabled(),
            "pixels that come normalised (mm_device_do_normalize)": not multimodal.mm_device_do_normalize,
            "--mm-encoder-tp-mode data": self.use_data_parallel,
            # What is left has its positions in the whole. For time that is scaled, and where vLLM prunes
            # itself, it has four times as many positions as the model names.
            "--max-model-len above a quarter of the model's positions": is_text
            and 4 * model.max_model_len > model.hf_text_config.max_position_embeddings,
        }
        if active := [name for name, is_on in refused.items() if is_on]:
            raise UnsupportedError(
                f"mm_processor_kwargs: {CHOICE} given, and not with {', '.join(active)}. Leave one out."
            )
        choice_of(multimodal, {})
        # The least that can be left of a picture.
        session.require([(1, session.packing.merge, session.packing.merge)])
        own = type(self)
        self.__class__ = type(own.__name__, (WithCells, own), {"__doc__": own.__doc__})
        self.rule, self.unit = _position_rule(self, session), session.packing.unit

    def largest_items(self, model: Any, session: EngineSession, served: Checkpoint) -> list[Grid]:
        """Return the largest image that a prompt has room for; videos are cut between smaller frames."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        merge, info = session.packing.merge, MULTIMODAL_REGISTRY.get_processing_info(model)
        _check_attributes(info, ["get_image_size_with_most_features"])
        width, height = info.get_image_size_with_most_features()
        patch = model.hf_config.vision_config.patch_size
        rows, columns = height // patch, width // patch
        if rows * columns > model.max_model_len * merge**2:
            rows = columns = math.isqrt(model.max_model_len) * merge
        return [(1, rows, columns)]

    def replace_tower(self, session: EngineSession, ranks: Ranks | None) -> None:
        _check_attributes(self.visual, READ)
        self.visual = BundleTower(session, {name: getattr(self.visual, name) for name in READ}, ranks)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        kept = without(self._left_out, weights) if self._left_out else weights
        loaded: set[str] = super().load_weights(kept)  # type: ignore[misc]
        return loaded


class WithPruning:
    """Prunes videos and places what is kept."""

    rows: MediaRows
    _tokenizer: Any

    def _postprocess_image_embeds_evs(
        self, image_embeds_split: Sequence[Tensor], image_input: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        grids = image_input["image_grid_thw"].tolist()
        return tuple(
            self.rows.of_image(rows, tuple(grid))
            for rows, grid in zip(image_embeds_split, grids, strict=True)
        )

    def _postprocess_video_embeds_evs(
        self, video_embeds_split: Sequence[Tensor], video_input: Any
    ) -> tuple[Tensor, ...]:
        grids, steps = video_input["video_grid_thw"].tolist(), video_input.get("second_per_grid_ts")
        times = video_input["timestamps"] if self.rows.rule.kind == "time_as_text" else [()] * len(grids)
        return tuple(
            self.rows.of_video(
                rows,
                tuple(grids[at]),
                seconds=None if steps is None else float(steps[at]),
                stamps=[
                    self._tokenizer.encode(f"<{float(time):.1f} seconds>", add_special_tokens=False)
                    for time in times[at]
                ],
            )
            for at, rows in enumerate(video_embeds_split)
        )

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        return self.rows.table(input_tokens, [_placed(feature) for feature in mm_features])

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[list[Tensor], Tensor, int]:
        return place_rows(input_ids, multimodal_embeddings, mrope_positions, num_computed_tokens)


class WithCells:
    """Takes some cells of media, and places their tokens where they are in the whole."""

    visual: Any
    rule: PositionRule
    unit: int

    def embed_multimodal(self, **given: Any) -> Any:
        # vLLM hands over one kind of media at a time.
        for kind, pixels in PIXELS.items():
            if f"{kind}_cells" in given:
                grids, lengths = given[f"{kind}_grid_thw"].tolist(), list(map(len, given[f"{kind}_cells"]))
                cells = map(self._some, given[f"{kind}_cells"], grids)
                return self.visual(given[pixels], grids, list(cells)).split(lengths)
        return super().embed_multimodal(**given)  # type: ignore[misc]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        media, kept = [_placed(feature) for feature in mm_features], list[Tensor | None]()
        for feature, item in zip(mm_features, media, strict=True):
            cells = feature.data.get(f"{feature.modality}_cells")
            kept.append(None if cells is None else self._some(cells.data, item.grid))
        if all(cells is None for cells in kept):
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc,no-any-return]
        if self.rule.kind == "time_as_text":
            found = frame_positions(input_tokens, media, kept, self.rule)
        else:
            found = pruned_positions(len(input_tokens), media, kept, self.rule)
        return found.table_RN, int(found.delta)

    def _some(self, cells: Tensor, grid: Sequence[int]) -> Tensor | None:
        """Return the cells, None where these are all."""
        return None if len(cells) * self.unit == math.prod(grid) else cells


def _position_rule(model: Any, session: EngineSession) -> PositionRule:
    config, kind, markers = model.config, session.recipe.position_rule, None
    if kind == "time_as_text":
        markers = FrameMarkers(
            vision_start=config.vision_start_token_id,
            vision_end=config.vision_end_token_id,
            video=config.video_token_id,
        )
    return PositionRule(
        kind=kind,  # type: ignore[arg-type]
        merge=session.packing.merge,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", 1),
        markers=markers,
    )


def _media_rows(model: Any, vllm_config: VllmConfig, session: EngineSession) -> MediaRows:
    config, rule = model.config, _position_rule(model, session)
    if rule.kind == "time_as_text":
        _check_attributes(model, ["_tokenizer"])
    method, rate = vllm_config.model_config.multimodal_config.get_video_pruning_spec()
    return MediaRows(
        rule=rule,
        selection=eager(find_method(method)),
        rate=rate,
        image=config.image_token_id,
        video=config.video_token_id,
        embed=model.get_language_model().embed_input_ids,
    )


def _placed(feature: Any) -> PlacedMedia:
    room, grid = feature.mm_position, feature.data[f"{feature.modality}_grid_thw"].data.tolist()
    seconds = feature.data.get("second_per_grid_ts")
    return PlacedMedia(
        modality=feature.modality,
        offset=room.offset,
        length=room.length,
        grid=tuple(grid),
        seconds_per_grid=1.0 if seconds is None else float(seconds.data),
    )


class WithProjector(WithBundle):
    """Replaces tower and projector of models that take images by rows and columns (Kimi-VL)."""

    vision_tower: Any
    multi_modal_projector: Any
    config: Any

    def given_bytes(self, multimodal: Any) -> bool:
        return False

    def largest_items(self, model: Any, session: EngineSession, served: Checkpoint) -> list[Grid]:
        """Return as many cells as an image may have, or a prompt has room for, in a line."""
        merge = session.packing.merge
        cells = min(_longest_segment(session, served), model.max_model_len)
        return [(1, merge, merge * cells)]

    def replace_tower(self, session: EngineSession, ranks: Ranks | None) -> None:
        _check_attributes(self, SPLIT)
        attributes = _attributes(self.vision_tower, self.config.text_config.hidden_size)
        self.vision_tower = _ImageByImage(BundleTower(session, attributes, ranks))
        self.multi_modal_projector = nn.Identity()


class _ImageByImage(nn.Module):
    """Returns the rows of each image by itself."""

    def __init__(self, whole: BundleTower) -> None:
        super().__init__()
        self.whole, self.session = whole, whole.session

    def forward(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        sizes = grids.tolist()
        rows: Tensor = self.whole(pixels.flatten(1), sizes)
        return list(rows.split([high * wide // self.session.packing.merge**2 for high, wide in sizes]))


class WithRelease:
    """An architecture that makes a model of another class, by the release of the checkpoint."""

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        model: Any = super().__new__(cls, vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        stock = type(model)
        model.__class__ = type(stock.__name__, (WithSlices, stock), {"__doc__": stock.__doc__})
        model.take_bundle(vllm_config)
        return model


class WithSlices(WithBundle):
    """Replaces tower and resampler of models whose images come as slices (MiniCPM-V)."""

    vpm: Any
    resampler: Any
    embed_dim: int
    version: tuple[int, int]

    def given_bytes(self, multimodal: Any) -> bool:
        return False

    def largest_items(self, model: Any, session: EngineSession, served: Checkpoint) -> list[Grid]:
        return [(1, 1, _longest_segment(session, served))]

    def replace_tower(self, session: EngineSession, ranks: Ranks | None) -> None:
        _check_attributes(self, SLICED)
        if self.version == (2, 0):
            raise UnsupportedError(
                f"{session.bundle.path}: release 2.0 of this family hands whole images to its tower, and "
                f"bundles take patches. Take '{KEY}' out of additional_config."
            )
        if ranks is not None:
            raise UnsupportedError(
                f"{session.bundle.path}: slices of this family cannot be shared by ranks. Leave "
                "--mm-encoder-tp-mode at its default, and every rank encodes all of them."
            )
        attributes = _attributes(self.vpm, self.embed_dim)
        self.vpm, self.resampler = BundleTower(session, attributes), nn.Identity()

    def get_vision_hidden_states(self, data: Mapping[str, Any]) -> Tensor:
        if not isinstance(self.vpm, BundleTower):
            states: Tensor = super().get_vision_hidden_states(data)  # type: ignore[misc]
            return states
        slices = data["pixel_values"]
        patches = torch.cat([rows_of_strip(strip) for strip in slices])
        rows: Tensor = self.vpm(patches, [(1, *size) for size in data["tgt_sizes"].tolist()])
        return torch.stack(rows.chunk(len(slices)))


def rows_of_strip(strip: Tensor) -> Tensor:
    """Return the patches of a slice, which lie side by side in one strip, as rows."""
    split: Tensor = strip.unflatten(2, (-1, strip.shape[1]))
    return split.permute(2, 0, 1, 3).flatten(1)


class _Cast(nn.Module):
    """Stands where pixels come normalised."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


def _attributes(replaced: nn.Module, width: int) -> dict[str, Any]:
    parameter = next(replaced.parameters())
    return {
        "out_hidden_size": width,
        "input_norm": _Cast(),
        "dtype": parameter.dtype,
        "device": parameter.device,
    }


def _longest_segment(session: EngineSession, served: Checkpoint) -> int:
    """Return the most cells of one image or slice that the processor of the served checkpoint makes."""
    config = session.recipe.read_config(served, session.bundle.manifest.input_dtype)
    sizes = session.recipe.packing(config).sizes(MediaBounds(max_pixels=ANY_PIXELS, max_images=1))
    return max(kind.length.max for kind in sizes.segments.values())


def _ranks() -> Ranks | None:
    """Return the groups of the ranks that share a model; None where it has one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return (group.device_group, group.cpu_group) if group.world_size > 1 else None


def _is_tested() -> bool:
    import vllm

    is_tested: bool = vllm.__version__.startswith(VERSIONS)
    return is_tested


def _check_version() -> None:
    import vllm

    if not _is_tested():
        raise MisfitError(
            f"vLLM {vllm.__version__} found, {' or '.join(f'{version}*' for version in VERSIONS)} expected, "
            f"which bundles were tested with. Install that, or take '{KEY}' out of additional_config."
        )


def _check_attributes(part: object, names: Iterable[str]) -> None:
    import vllm

    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        raise MisfitError(
            f"vLLM {vllm.__version__}: {type(part).__name__} has no {', '.join(missing)}, and bundles need "
            "them. Install vllm 0.32.0."
        )


def _check_pruning(vllm_config: VllmConfig, *, by_time: bool) -> None:
    # Media in cached blocks are not encoded, and with scaled time the shift of decoded tokens follows from
    # what is kept. The windows of a draft model begin one token after the number of computed tokens.
    speculation = vllm_config.speculative_config
    refused = {
        "prefix caching (--no-enable-prefix-caching)": by_time
        and vllm_config.cache_config.enable_prefix_caching,
        "speculation other than 'ngram'": speculation is not None and speculation.method != "ngram",
    }
    active = [name for name, is_on in refused.items() if is_on]
    if active:
        raise UnsupportedError(
            f"{', '.join(active)}: not where videos are pruned. Switch it off, or leave out "
            "video_pruning_rate."
        )


def _check_options(vllm_config: VllmConfig) -> None:
    lora = vllm_config.lora_config
    refused = {
        "LoRA on tower and connector": lora is not None and lora.enable_tower_connector_lora,
        "CUDA graphs of the encoder": vllm_config.compilation_config.cudagraph_mm_encoder,
        # vLLM's runner for processors has none, so that it was never tried.
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    active = [name for name, is_on in refused.items() if is_on]
    if active:
        raise UnsupportedError(
            f"{', '.join(active)}: not with a tower that is a bundle. Switch it off, or take '{KEY}' out of "
            "additional_config."
        )
