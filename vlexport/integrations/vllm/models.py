"""Models of vLLM whose tower is a bundle, if one is named; else they are vLLM's own.

`VERSIONS` are those that were tested. What is used of vLLM beyond its documented interface is here alone:
`visual`, the names in `READ` and `SLICED`, `use_data_parallel`, the group of the ranks, the size of the
largest image, and options that are refused.
vLLM is imported when it looks for a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
from vlexport.runtime.encoder import Grid, Tower

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSIONS = ("0.32.",)
# Attributes of a tower that models and their helpers read.
READ = ("spatial_merge_size", "out_hidden_size", "input_norm", "dtype", "device")
# Parts of models that take slices, and what gives their rows.
SLICED = ("vpm", "resampler", "embed_dim", "get_vision_hidden_states")


def __getattr__(name: str) -> type:
    if name not in architectures():
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _model(name)


@cache
def _model(architecture: str) -> type:
    """Return the class of an architecture, derived from vLLM's own."""
    stock = getattr(
        import_module(f"vllm.model_executor.models.{architectures()[architecture]}"), architecture
    )
    kind = WithRelease if "__new__" in vars(stock) else WithBundle
    return type(architecture, (kind, stock), {"__module__": __name__, "__doc__": stock.__doc__})


class WithBundle:
    """Replaces the tower once the model is made, and leaves its weights unread."""

    visual: Any
    use_data_parallel: bool
    _left_out: tuple[str, ...] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.take_bundle(vllm_config)

    def take_bundle(self, vllm_config: VllmConfig) -> None:
        """Replace the tower, if a bundle is named."""
        settings = BundleSettings.of(vllm_config.additional_config)
        if settings is None:
            return
        _check_version()
        model = vllm_config.model_config
        multimodal = model.multimodal_config
        # A model that takes no media is made without its tower, and needs no bundle either.
        if not any(map(multimodal.get_limit_per_prompt, ("image", "video"))):
            return
        _check_options(vllm_config)
        served = Checkpoint.open(model.model, revision=model.revision)
        tower = open_tower(settings, served, given_bytes=self.given_bytes(multimodal))
        try:
            # Later a call that does not fit would end the engine of vLLM, not one request.
            tower.require(self.largest_items(model, tower.packing.merge))
            self._left_out = tower_prefixes(tower, served)
            self.replace_tower(tower, _ranks() if self.use_data_parallel else None)
        except BaseException:
            tower.engine.close()
            raise
        # vLLM's own way to spread items over ranks reads the parameters of a tower.
        self.use_data_parallel = False

    def given_bytes(self, multimodal: Any) -> bool:
        """Return whether pixels come as bytes."""
        given: bool = multimodal.mm_device_do_normalize
        return given

    def largest_items(self, model: Any, merge: int) -> list[Grid]:
        """Return the largest image that a prompt has room for; videos are cut between smaller frames."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        info = MULTIMODAL_REGISTRY.get_processing_info(model)
        _check_attributes(info, ["get_image_size_with_most_features"])
        width, height = info.get_image_size_with_most_features()
        patch = model.hf_config.vision_config.patch_size
        rows, columns = height // patch, width // patch
        if rows * columns > model.max_model_len * merge**2:
            rows = columns = math.isqrt(model.max_model_len) * merge
        return [(1, rows, columns)]

    def replace_tower(self, tower: Tower, ranks: Ranks | None) -> None:
        """Put the bundle in the place of the tower."""
        _check_attributes(self.visual, READ)
        self.visual = BundleTower(tower, {name: getattr(self.visual, name) for name in READ}, ranks)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights but those of a tower that was replaced."""
        kept = without(self._left_out, weights) if self._left_out else weights
        loaded: set[str] = super().load_weights(kept)  # type: ignore[misc]
        return loaded


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
        """Return that pixels come normalised; vLLM has no other way for these."""
        return False

    def largest_items(self, model: Any, merge: int) -> list[Grid]:
        """Return one patch: slices are as large as the profile was made for."""
        return [(1, 1, 1)]

    def replace_tower(self, tower: Tower, ranks: Ranks | None) -> None:
        """Put the bundle in the place of tower and resampler."""
        _check_attributes(self, SLICED)
        if self.version == (2, 0):
            raise UnsupportedError(
                f"{tower.bundle.path}: release 2.0 of this family hands whole images to its tower, and "
                f"bundles take patches. Take '{KEY}' out of additional_config."
            )
        if ranks is not None:
            raise UnsupportedError(
                f"{tower.bundle.path}: slices of this family cannot be shared by ranks. Leave "
                "--mm-encoder-tp-mode at its default, and every rank encodes all of them."
            )
        parameter = next(self.vpm.parameters())
        attributes = {
            "out_hidden_size": self.embed_dim,
            "input_norm": _Cast(),
            "dtype": parameter.dtype,
            "device": parameter.device,
        }
        self.vpm, self.resampler = BundleTower(tower, attributes), nn.Identity()

    def get_vision_hidden_states(self, data: Mapping[str, Any]) -> Tensor:
        """Return the rows of each slice; all slices have the same number."""
        if not isinstance(self.vpm, BundleTower):
            found: Tensor = super().get_vision_hidden_states(data)  # type: ignore[misc]
            return found
        slices = data["pixel_values"]
        # Patches of a slice lie side by side in one strip.
        strips = [strip.unflatten(2, (-1, strip.shape[1])) for strip in slices]
        patches = torch.cat([strip.permute(2, 0, 1, 3).flatten(1) for strip in strips])
        rows: Tensor = self.vpm(patches, [(1, *size) for size in data["tgt_sizes"].tolist()])
        return torch.stack(rows.chunk(len(slices)))


class _Cast(nn.Module):
    """Stands where pixels come normalised."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


def _ranks() -> Ranks | None:
    """Return the groups of the ranks that share a model; None where it has one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return (group.device_group, group.cpu_group) if group.world_size > 1 else None


def _check_version() -> None:
    """Refuse versions of vLLM that were not tested."""
    import vllm

    if not vllm.__version__.startswith(VERSIONS):
        raise MisfitError(
            f"vLLM {vllm.__version__} found, {' or '.join(f'{each}*' for each in VERSIONS)} expected, which "
            f"bundles were tested with. Install that, or take '{KEY}' out of additional_config."
        )


def _check_attributes(part: object, names: Iterable[str]) -> None:
    """Refuse a tower or a model without the attributes that are used."""
    import vllm

    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        raise MisfitError(
            f"vLLM {vllm.__version__}: {type(part).__name__} has no {', '.join(missing)}, and bundles need "
            "them. Install vllm 0.32.0."
        )


def _check_options(vllm_config: VllmConfig) -> None:
    """Refuse options that need a tower of vLLM's own."""
    lora = vllm_config.lora_config
    refused = {
        "LoRA on tower and connector": lora is not None and lora.enable_tower_connector_lora,
        "CUDA graphs of the encoder": vllm_config.compilation_config.cudagraph_mm_encoder,
    }
    found = [name for name, is_on in refused.items() if is_on]
    if found:
        raise UnsupportedError(
            f"{', '.join(found)}: not with a tower that is a bundle. Switch it off, or take '{KEY}' out of "
            "additional_config."
        )
