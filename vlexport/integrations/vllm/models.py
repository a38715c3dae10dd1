"""Models of vLLM whose tower is a bundle, if one is named; else they are vLLM's own.

`VERSIONS` are those that were tested. What is used of vLLM beyond its documented interface is here alone:
`visual`, the attributes in `READ`, `use_data_parallel`, the group of the ranks, and options that are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl

from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError, UnsupportedError
from vlexport.integrations.vllm.bundle_tower import (
    KEY,
    BundleSettings,
    BundleTower,
    open_tower,
    tower_prefixes,
    without,
)

VERSIONS = ("0.32.",)
# Attributes of a tower that models and their helpers read.
READ = ("spatial_merge_size", "out_hidden_size", "input_norm")


class _WithBundle:
    """Replaces `visual` once the model is made, and leaves the weights of the tower unread."""

    visual: Any
    use_data_parallel: bool
    _left_out: tuple[str, ...] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        settings = BundleSettings.of(vllm_config.additional_config)
        if settings is None:
            return
        _check_version(self.visual)
        model = vllm_config.model_config
        multimodal = model.multimodal_config
        # A model that takes no media is made without its tower, and needs no bundle either.
        if not any(map(multimodal.get_limit_per_prompt, ("image", "video"))):
            return
        _check_options(vllm_config)
        served = Checkpoint.open(model.model, revision=model.revision)
        tower = open_tower(settings, served, given_bytes=multimodal.mm_device_do_normalize)
        self._left_out = tower_prefixes(tower, served)
        ranks = get_tp_group() if self.use_data_parallel and get_tp_group().world_size > 1 else None
        shared = ranks and (ranks.device_group, ranks.cpu_group)
        self.visual = BundleTower(tower, self.visual, READ, shared)
        # vLLM's own way to spread items over ranks reads the parameters of a tower.
        self.use_data_parallel = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights but those of a tower that was replaced."""
        kept = without(self._left_out, weights) if self._left_out else weights
        loaded: set[str] = super().load_weights(kept)  # type: ignore[misc]
        return loaded


def _check_version(tower: object) -> None:
    """Refuse versions of vLLM that were not tested, and towers without the attributes that are read."""
    if not vllm.__version__.startswith(VERSIONS):
        raise MisfitError(
            f"vLLM {vllm.__version__} found, {' or '.join(f'{each}*' for each in VERSIONS)} expected, which "
            f"bundles were tested with. Install that, or take '{KEY}' out of additional_config."
        )
    missing = [name for name in (*READ, "dtype", "device") if not hasattr(tower, name)]
    if missing:
        raise MisfitError(
            f"vLLM {vllm.__version__}: {type(tower).__name__} has no {', '.join(missing)}, and bundles need "
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


class Qwen2VL(_WithBundle, qwen2_vl.Qwen2VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen2-VL."""


class Qwen2_5VL(_WithBundle, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """Qwen2.5-VL; pruning of videos stays vLLM's."""


class Qwen3VL(_WithBundle, qwen3_vl.Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL, with its levels; pruning of videos stays vLLM's."""
