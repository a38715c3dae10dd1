"""Decoder and tokenizer of a checkpoint, together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnknownModelError, UnsupportedError
from vlexport.language import LanguageRule
from vlexport.recipe import Recipe
from vlexport.runtime.decoder import Decoder, DecoderOptions, TransformersDecoder
from vlexport.runtime.text_model import load_text_model
from vlexport.runtime.tokenizer import CheckpointTokenizer, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A decoder, the tokenizer of its prompts, and the ids that end an answer."""

    decoder: Decoder
    tokenizer: Tokenizer
    ends: frozenset[int]


def language_of(
    recipe: Recipe[Any], decoder: str | Path | Checkpoint | Language, options: DecoderOptions
) -> Language:
    """The decoder of a checkpoint of the recipe's family, or one that is there already."""
    if isinstance(decoder, Language):
        return decoder
    checkpoint = decoder if isinstance(decoder, Checkpoint) else Checkpoint.open(decoder)
    if checkpoint.model_type not in recipe.model_types:
        raise UnknownModelError(
            f"{checkpoint.source} is '{checkpoint.model_type}', but the bundle is of recipe '{recipe.name}', "
            f"for {', '.join(sorted(recipe.model_types))}. Pass the checkpoint that it was built from."
        )
    if recipe.language is None:
        raise UnsupportedError(no_language(recipe))
    return load_language(checkpoint, recipe.language, options)


def no_language(recipe: Recipe[Any]) -> str:
    """What is said where a family has no decoder here."""
    return (
        f"recipe '{recipe.name}' does not say how its decoder is spoken to. "
        "Use `encode` and your own decoder."
    )


def load_language(checkpoint: Checkpoint, rule: LanguageRule[Any], options: DecoderOptions) -> Language:
    """Decoder and tokenizer of a checkpoint; of its tensors only those of the language model are read."""
    require_device(options.device)
    model = load_text_model(checkpoint, rule, options.dtype, options.device)
    decoder = TransformersDecoder(model, options)
    tokenizer = CheckpointTokenizer(checkpoint)
    return Language(decoder=decoder, tokenizer=tokenizer, ends=end_ids(checkpoint))


def require_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot reach, before anything is read for it."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UnsupportedError(
            f"device '{device}': torch cannot use it here ({reason}). Pass --device cpu, or install a torch "
            "for that device on a machine that has one."
        ) from error


def end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json, else of config.json."""
    views = [checkpoint.view, checkpoint.text_config]
    if checkpoint.has_file("generation_config.json"):
        views.insert(0, checkpoint.read_json("generation_config.json"))
    for view in views:
        if view.has("eos_token_id"):
            given = dict(view.items())["eos_token_id"]
            one = not isinstance(given, list)
            return frozenset([view.require_int("eos_token_id")] if one else view.require_ints("eos_token_id"))
    return frozenset()
