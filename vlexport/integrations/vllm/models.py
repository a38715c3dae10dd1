"""Models of vLLM whose tower is a bundle, if one is named; else they are vLLM's own.

`VERSIONS` are those that were tested. What is used of vLLM beyond its documented interface is here alone:
`visual`, the attributes in `READ`, `use_data_parallel`, the group of the ranks, and options that are refused.
vLLM is imported when it looks for a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError, UnsupportedError
from vlexport.integrations.vllm import architectures
from vlexport.integrations.vllm.bundle_tower import (
    KEY,
    BundleSettings,
    BundleTower,
    open_tower,
    tower_prefixes,
    without,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSIONS = ("0.32.",)
# Attributes of a tower that models and their helpers read.
READ = ("spatial_merge_size", "out_hidden_size", "input_norm")


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
    return type(architecture, (WithBundle, stock), {"__module__": __name__, "__doc__": stock.__doc__})


class WithBundle:
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
        self.visual = BundleTower(tower, self.visual, READ, _ranks() if self.use_data_parallel else None)
        # vLLM's own way to spread items over ranks reads the parameters of a tower.
        self.use_data_parallel = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights but those of a tower that was replaced."""
        kept = without(self._left_out, weights) if self._left_out else weights
        loaded: set[str] = super().load_weights(kept)  # type: ignore[misc]
        return loaded


def _ranks() -> Any:
    """Return the groups of the ranks that share a model; None where it has one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return (group.device_group, group.cpu_group) if group.world_size > 1 else None


def _check_version(tower: object) -> None:
    """Refuse versions of vLLM that were not tested, and towers without the attributes that are read."""
    import vllm

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
