"""The text model of a checkpoint, with its output layer, and nothing else of the checkpoint in memory.

N tokens of a step, S places that attention sees, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.borders import refused_as_checkpoint
from vlexport.errors import CheckpointError
from vlexport.language import HEAD, LanguageRule


class TextModel(nn.Module):
    """A text model of transformers with its output layer."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, embeds_1ND: Tensor, positions: Tensor, mask_11NS: Tensor, cache: Any) -> Tensor:
        """Return logits [V] of what follows the last token."""
        found = self.body(
            inputs_embeds=embeds_1ND,
            position_ids=positions,
            attention_mask=mask_11NS,
            past_key_values=cache,
            use_cache=True,
        )
        logits_V: Tensor = self.head(found.last_hidden_state[0, -1])
        return logits_V


def load_text_model(
    checkpoint: Checkpoint, rule: LanguageRule[Any], dtype: str | None, device: str = "cpu"
) -> TextModel:
    """Build the model on the meta device and fill it tensor by tensor: nothing is held twice."""
    with refused_as_checkpoint(checkpoint.path / "config.json"):
        body = rule.build(checkpoint)
        _check_forward(body)
    names = checkpoint.tensor_names()
    prefix = next((each for each in rule.prefixes if f"{each}embed_tokens.weight" in names), None)
    if prefix is None:
        raise CheckpointError(
            f"{checkpoint.source} holds no language model: no tensor embed_tokens.weight below "
            f"{' or '.join(map(repr, rule.prefixes))}. Pass a checkpoint with its decoder."
        )
    shapes = {name: tuple(value.shape) for name, value in body.state_dict().items()}
    stored = checkpoint.check_names(shapes, prefix)
    with refused_as_checkpoint(checkpoint.path / "config.json"):
        scales = rule.scales(checkpoint)
    weights = scaled_tensors(checkpoint, stored, scales, dtype)
    # Moved one by one, so that a device with memory of its own costs the host no more than one tensor.
    body.load_state_dict({name: tensor.to(device) for name, tensor in weights}, strict=True, assign=True)
    _fill_buffers(body)
    table_VD = body.get_parameter("embed_tokens.weight")
    head_name = next((name for name in rule.heads if name in names), None)
    with torch.device("meta"):
        head = nn.Linear(table_VD.shape[1], table_VD.shape[0], bias=False)
    if head_name is None and HEAD not in scales:
        head.weight = nn.Parameter(table_VD, requires_grad=False)
    else:
        read = {HEAD: head_name or stored["embed_tokens.weight"]}
        weight_VD = dict(scaled_tensors(checkpoint, read, scales, dtype))[HEAD]
        if weight_VD.shape != table_VD.shape:
            raise CheckpointError(
                f"{checkpoint.source}: '{head_name}' is {list(weight_VD.shape)}, "
                f"{list(table_VD.shape)} expected. Check that config.json belongs to these weights."
            )
        head.load_state_dict({"weight": weight_VD}, assign=True)
    return TextModel(body, head).to(device).eval().requires_grad_(False)


@torch.inference_mode()
def _check_forward(body: nn.Module) -> None:
    """Take one step without memory: settings that make a model may still be at odds in its forward pass."""
    width = body.get_parameter("embed_tokens.weight").shape[1]
    places = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    # With a mask of its own, or the library looks into the positions for packed sequences.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")
    embeds = torch.empty(1, 1, width, device="meta")
    body(inputs_embeds=embeds, position_ids=places, attention_mask=mask, use_cache=False)


def scaled_tensors(
    checkpoint: Checkpoint, stored: Mapping[str, str], scales: Mapping[str, float], dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors times their factors, multiplied in float32 and rounded once."""
    if not scales:
        yield from checkpoint.tensors(stored, dtype=dtype)
        return
    for name, tensor in checkpoint.tensors(stored):
        factor = next((scale for end, scale in scales.items() if name.endswith(end)), 1.0)
        wanted: torch.dtype = getattr(torch, dtype) if dtype else tensor.dtype
        yield name, (factor * tensor.float()).to(wanted)


def _fill_buffers(body: nn.Module) -> None:
    """Make rotary tables anew off the meta device: they are buffers outside the state."""
    for name, module in list(body.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, last = name.rpartition(".")
            setattr(body.get_submodule(parent), last, type(module)(body.config))
