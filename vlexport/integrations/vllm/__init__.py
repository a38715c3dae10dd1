"""Bundles as the towers of models inside vLLM, and helpers for systems with interfaces like its own."""

from __future__ import annotations

from collections.abc import Mapping

from vlexport.codec import load_strict
from vlexport.recipe import recipe_folder


def register() -> None:
    """Register the models under vLLM's own names; vLLM runs this in each of its processes, perhaps twice."""
    from vllm import ModelRegistry

    for architecture in architectures():
        ModelRegistry.register_model(architecture, f"{__name__}.models:{architecture}")


def architectures() -> Mapping[str, str]:
    """Return the architectures of vLLM whose tower can be a bundle, each with its module there."""
    modules: Mapping[str, str] = load_strict((recipe_folder() / "vllm.json").read_text(encoding="utf-8"))
    return modules
