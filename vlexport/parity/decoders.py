"""L0 of the language model that goes with a tower: its weights as stored, times what config.json scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlexport.checkpoint import Checkpoint
from vlexport.language import LanguageRule
from vlexport.parity.stored import READ_AGAIN, raw_tensors
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Finding
from vlexport.runtime.text_model import load_text_model

TABLE, OUTPUT = "embed_tokens.weight", "lm_head.weight"


def check_decoder(subject: Subject) -> list[Finding]:
    """Every weight of a small decoder against the bytes of its files; of a large one the factors alone."""
    rule, checkpoint = subject.recipe.language, subject.checkpoint
    names = checkpoint.tensor_names()
    prefixes = rule.prefixes if rule else ()
    prefix = next((each for each in prefixes if f"{each}{TABLE}" in names), None)
    if rule is None or prefix is None:
        return []
    factors = _factors(checkpoint.config)
    stored = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    stored[OUTPUT] = next((name for name in rule.heads if name in names), stored[TABLE])
    if 4 * sum(math.prod(checkpoint.stored(name).shape) for name in stored.values()) > READ_AGAIN:
        given = dict(rule.scales(checkpoint))
        wrong = [name for name in {**given, **factors} if _differ(given, factors, name)]
    else:
        wrong = _wrong_weights(checkpoint, rule, stored, factors)
    return [Finding(table="language weights", wrong=len(wrong), first=wrong[0] if wrong else "")]


def _wrong_weights(
    checkpoint: Checkpoint, rule: LanguageRule[Any], stored: Mapping[str, str], factors: Mapping[str, float]
) -> list[str]:
    """Names of the weights that the decoder does not hold as it should."""
    model = load_text_model(checkpoint, rule, "float32")
    given: dict[str, Tensor] = {**model.body.state_dict(), OUTPUT: model.head.weight}
    raw = dict(raw_tensors(checkpoint.complete(), set(stored.values())))
    wrong = []
    for name, where in stored.items():
        factor = next((factors[end] for end in factors if name.endswith(end)), 1.0)
        wanted = raw[where].double() * factor
        if name not in given or not torch.allclose(given[name].double(), wanted, rtol=1e-6, atol=0.0):
            wrong.append(name)
    return wrong


def _factors(config: Mapping[str, object]) -> dict[str, float]:
    """What decoders with these entries multiply: embeddings, both branches of a layer, logits."""
    if "scale_emb" not in config:
        return {}
    read = {name: float(str(config[name])) for name in ("scale_emb", "scale_depth", "dim_model_base")}
    depth, width = (float(str(config[name])) for name in ("num_hidden_layers", "hidden_size"))
    branches = read["scale_depth"] / math.sqrt(depth)
    return {
        TABLE: read["scale_emb"],
        "o_proj.weight": branches,
        "down_proj.weight": branches,
        OUTPUT: read["dim_model_base"] / width,
    }


def _differ(given: Mapping[str, float], wanted: Mapping[str, float], name: str) -> bool:
    """Whether the factor for this ending is another one."""
    other = next((value for end, value in wanted.items() if name.endswith(end) or end.endswith(name)), None)
    mine = next((value for end, value in given.items() if name.endswith(end) or end.endswith(name)), None)
    return mine is None or other is None or not math.isclose(mine, other)
