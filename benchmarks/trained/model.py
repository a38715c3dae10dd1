"""Config, tokenizer and weights of the trained checkpoint, and a forward pass over batches of equal shapes.

B scenes, T steps, P patches of a frame, S merged cells of a scene, Q questions, L tokens of one, D width.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index
from vlexport.recipes.demo.qwen2_5_vl import EACH, TURNS, Text, Tiny, contents, processor_json
from vlexport.recipes.demo.writing import CheckpointContents, write_checkpoint

from benchmarks.trained import scenes

SIZES = Tiny(
    depth=4,
    hidden=64,
    heads=4,
    inner=160,
    out=128,
    text=Text(width=128, heads=4, layers=4, inner=320, vocabulary=640),
)
# Windows of 2 x 2 merged cells in frames of 3 x 5, so that windows are cut on both sides.
WINDOW = 56
# Columns have the slowest angles: 0.12 to 0.24 a cell in heads of 32. With 1,000,000 they were below 0.0002.
ROPE_THETA = 10.0
# No system turn: fewer tokens to read.
CHAT_TEMPLATE = EACH + TURNS
PATCH, MERGE = 14, 2
PATCHES = (scenes.HEIGHT // PATCH, scenes.WIDTH // PATCH)
CELLS = scenes.ROWS * scenes.COLUMNS
IGNORED = -100
# Shapes with words and digits, colours, each or none; and whether the thing came or moved.
READ = (len(scenes.SHAPES) + len(scenes.TEXTS) + 1, len(scenes.COLOURS) + 1, 2)


def checkpoint_contents() -> CheckpointContents:
    """Return config, processors and tokenizer; the tensors are those of random weights."""
    words = ("user", "assistant", *_words())
    made: CheckpointContents = contents(SIZES)
    config: dict[str, Any] = dict(made.config)
    # One position a step: a step is a second.
    vision = {**config["vision_config"], "window_size": WINDOW, "tokens_per_second": 1}
    rope = {**config["text_config"]["rope_parameters"], "rope_theta": ROPE_THETA}
    text = {**config["text_config"], "rope_parameters": rope}
    tokenizer = replace(made.tokenizer, chat_template=CHAT_TEMPLATE, words=words)
    return replace(made, config={**config, "vision_config": vision, "text_config": text}, tokenizer=tokenizer)


def _words() -> list[str]:
    """Return the words of questions and answers, with the space before them where there is one."""
    found: set[str] = set()
    for number in range(100):
        for kind in scenes.QUESTIONS:
            for question in scenes.draw_scene(kind, 0, number).questions:
                found.update(
                    re.findall(r"^\w+| \w+", question.prompt), re.findall(r"^\w+| \w+", question.answer)
                )
    return sorted(word for word in found if len(word) > 1)


def patches_of(frames: np.ndarray) -> Tensor:
    """Return rows of patches (frames x P x values) of (B, frames, H, W, 3); a picture is its own pair."""
    pixels = torch.from_numpy(frames)
    if pixels.shape[1] == 1:
        pixels = pixels.expand(-1, 2, -1, -1, -1)
    settings = processor_json("image")
    pixels = (pixels.float() / 255 - torch.tensor(settings["image_mean"])) / torch.tensor(
        settings["image_std"]
    )
    cut = pixels.reshape(-1, 2, scenes.ROWS, MERGE, PATCH, scenes.COLUMNS, MERGE, PATCH, 3)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, CELLS * MERGE**2, 3 * 2 * PATCH**2)


def _vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a block of the tower to frames of patches (frames x P x D)."""
    attention = block.attn
    heads = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    q, k, v = heads.unbind(2)
    q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
    found = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    x = x + attention.proj(found.transpose(1, 2).flatten(2))
    merged: Tensor = x + block.mlp(block.norm2(x))
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Frames of scenes of one medium, ids of their questions with what follows, and contents of cells."""

    medium: str
    frames: np.ndarray
    ids_BQL: Tensor
    targets_BQL: Tensor
    shapes_BS: Tensor
    colours_BS: Tensor
    # Cells of what comes or moves in a step.
    events_BS: Tensor


class TrainedModel:
    """The model with its tokenizer, and what training needs beside it."""

    def __init__(self, folder: Path) -> None:
        """Write the checkpoint's files where there are none, and open them."""
        self.folder = folder
        if not (folder / "config.json").exists():
            write_checkpoint(folder, checkpoint_contents())
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        config = Qwen2_5_VLConfig.from_pretrained(str(folder))
        self.model = Qwen2_5_VLForConditionalGeneration(config)
        # What lies in a cell, read from its token: an aid of the training, not stored.
        self.reader = nn.Linear(SIZES.out, sum(READ))
        self.specials = {
            name: self.tokenizer.convert_tokens_to_ids(name) for name in self.tokenizer.all_special_tokens
        }

    def initialise(self, seed: int) -> None:
        """Draw new weights: std 1/sqrt(fan_in), branches smaller by the square root of their number."""
        torch.manual_seed(seed)
        for name, weight in [*self.model.named_parameters(), *self.reader.named_parameters()]:
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.ndim == 1:
                nn.init.ones_(weight)
            elif "embed_tokens" in name:
                nn.init.normal_(weight, std=0.5)
            else:
                nn.init.normal_(weight, std=1 / math.sqrt(weight[0].numel()))
            if re.search(r"attn\.proj\.weight|o_proj|down_proj", name):
                depth = SIZES.depth if "visual" in name else SIZES.text.layers
                weight.data /= math.sqrt(2 * depth)

    @cached_property
    def window_mask(self) -> Tensor:
        """Return which patches of a frame attend to which in blocks with windows."""
        order, lengths = get_vision_window_index(
            torch.tensor([[1, *PATCHES]]), spatial_merge_size=MERGE, window_size=WINDOW, patch_size=PATCH
        )
        bounds = torch.as_tensor(lengths)
        of_ordered = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        of_cell = torch.empty(CELLS, dtype=torch.int64)
        of_cell[torch.as_tensor(order)] = of_ordered[:: MERGE**2]
        of_patch = of_cell.repeat_interleave(MERGE**2)
        return of_patch[:, None] == of_patch[None]

    def encode(self, patches: Tensor) -> Tensor:
        """Return tokens (frames x cells x D): transformers' own modules on all frames at once."""
        tower = self.model.model.visual
        kernel = tower.patch_embed.proj.weight.flatten(1)
        x = functional.linear(patches, kernel)
        places = get_vision_position_ids(torch.tensor([[1, *PATCHES]]), MERGE)
        cos, sin = tower.rotary_pos_emb(x, places)
        for at, block in enumerate(tower.blocks):
            mask = None if at in tower.fullatt_block_indexes else self.window_mask
            x = _vision_block(block, x, cos, sin, mask)
        tokens: Tensor = tower.merger(x)
        return tokens.reshape(-1, CELLS, SIZES.out)

    def prefix(self, medium: str, steps: int) -> tuple[list[int], Tensor]:
        """Return the ids up to the question, and the positions (3 x tokens) of these."""
        pad = self.specials[f"<|{medium}_pad|>"]
        before = self.encode_text("<|im_start|>user\n<|vision_start|>")
        start = len(before)
        t, h, w = np.indices((steps, scenes.ROWS, scenes.COLUMNS)).reshape(3, -1)
        own = torch.from_numpy(np.stack([t, h, w])) + start
        text = torch.arange(start).expand(3, -1)
        after = torch.full((3, 1), int(own.max()) + 1)
        ids = [*before, *[pad] * (steps * CELLS), self.specials["<|vision_end|>"]]
        return ids, torch.cat([text, own, after], dim=1)

    def question_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the ids of the question up to the answer, and those of the answer with its end."""
        prompt_ids = self.encode_text(f"{prompt}<|im_end|>\n<|im_start|>assistant\n")
        return prompt_ids, [*self.encode_text(answer), self.specials["<|im_end|>"]]

    def encode_text(self, text: str) -> list[int]:
        """Return token ids. The class around the tokenizer changes its settings, which threads share."""
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of answers, that of the reader, and for each question: right or not."""
        scenes_B, questions, length = batch.ids_BQL.shape
        tokens = self.encode(patches_of(batch.frames))
        shapes, colours, events = self.reader(tokens.flatten(0, 1)).split(READ, dim=1)
        aid = functional.cross_entropy(shapes, batch.shapes_BS.flatten())
        aid = aid + functional.cross_entropy(colours, batch.colours_BS.flatten())
        if batch.medium == "video":
            aid = aid + functional.cross_entropy(events, batch.events_BS.flatten())
        steps = len(tokens) // scenes_B
        prefix_ids, prefix_3N = self.prefix(batch.medium, steps)
        start, before = len(prefix_ids), len(prefix_ids) - 1 - steps * CELLS
        table = self.model.model.language_model.embed_tokens
        text_N = table(torch.tensor(prefix_ids)).expand(scenes_B, -1, -1)
        embeds = torch.cat(
            [
                text_N[:, :before],
                tokens.reshape(scenes_B, steps * CELLS, -1),
                text_N[:, -1:],
                table(batch.ids_BQL.flatten(1)),
            ],
            dim=1,
        )
        first = int(prefix_3N.max()) + 1
        prompt_ids = torch.arange(first, first + length).repeat(questions).expand(3, -1)
        positions = torch.cat([prefix_3N, prompt_ids], dim=1)[:, None]
        group = torch.cat([torch.full((start,), -1), torch.arange(questions).repeat_interleave(length)])
        total = len(group)
        # Each question is alone with the scene: as many prompts as questions, the scene read once.
        seen = ((group[None] == -1) | (group[:, None] == group[None])) & torch.ones(
            total, total
        ).tril().bool()
        language = self.model.model.language_model
        turns = language.rotary_emb(embeds, positions)
        for layer in language.layers:
            embeds = layer(embeds, attention_mask=seen[None, None], position_embeddings=turns)
        found = language.norm(embeds[:, start:])
        targets = batch.targets_BQL.flatten(1)
        wanted = targets != IGNORED
        logits = self.model.lm_head(found[wanted])
        wrong = torch.zeros_like(targets)
        wrong[wanted] = (logits.argmax(-1) != targets[wanted]).long()
        right = wrong.reshape(scenes_B, questions, length).sum(-1) == 0
        return functional.cross_entropy(logits, targets[wanted]), aid, right

    def save(self) -> None:
        """Write the weights as float32 with values that bfloat16 holds, as released models are trained."""
        kept = {
            name: weight.detach().bfloat16().float().contiguous() for name, weight in self._stored().items()
        }
        save_file(kept, self.folder / "model.safetensors", metadata={"format": "pt"})

    def load(self) -> None:
        with torch.no_grad():
            stored = load_file(self.folder / "model.safetensors")
            for name, weight in self._stored().items():
                weight.copy_(stored[name])

    def _stored(self) -> dict[str, Tensor]:
        """Return parameters by the names that released checkpoints have."""
        found: dict[str, Tensor] = {}
        for name, weight in self.model.named_parameters():
            found[name.removeprefix("model.").replace("language_model.", "model.")] = weight
        return found
