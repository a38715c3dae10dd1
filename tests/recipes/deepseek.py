"""DeepSeek-V3's class with the weights of a checkpoint's decoder, loaded by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV3ForCausalLM

from vlexport.checkpoint import Checkpoint

PREFIX = "language_model."


def text_model_of(checkpoint: Checkpoint, folder: Path) -> Any:
    """Write the decoder as a checkpoint of its own and let transformers read it."""
    settings: Any = dict(checkpoint.config["text_config"])  # type: ignore[call-overload]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)
    stored = load_file(checkpoint.path / "model.safetensors")
    own = {name.removeprefix(PREFIX): each for name, each in stored.items() if name.startswith(PREFIX)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return DeepseekV3ForCausalLM.from_pretrained(folder).eval()
