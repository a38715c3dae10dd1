"""Bundles as the towers of models inside vLLM, and helpers for systems with interfaces like its own."""

from __future__ import annotations

# Architectures of vLLM whose tower a bundle can be, and the classes in `models` that make it so.
MODELS = {
    "Qwen2VLForConditionalGeneration": "Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5VL",
    "Qwen3VLForConditionalGeneration": "Qwen3VL",
}


def register() -> None:
    """Register the models; vLLM runs this in each of its processes, perhaps twice, and imports them late.

    Models keep vLLM's own names. One that is started without a bundle is vLLM's own model.
    """
    from vllm import ModelRegistry

    for architecture, name in MODELS.items():
        ModelRegistry.register_model(architecture, f"{__name__}.models:{name}")
