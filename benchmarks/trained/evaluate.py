"""Right answers to the held-out questions.

transformers answers them as they are, with the frames of videos in another order, and with the first frame
alone; a guesser that sees no pixels gives the commonest answer to each prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from benchmarks.trained import scenes
from benchmarks.trained.model import CELLS, MERGE, PATCHES, patches_of

# The guesser learns from as many questions again, ten times over.
GUESSER_SEED, GUESSER_SHARE = 2, 10
BATCH, LONGEST = 32, 6

Pairs = Sequence[tuple[scenes.Scene, scenes.Question]]


def shuffled(frames: np.ndarray, number: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64([number, 4]))
    return frames[rng.permutation(len(frames))]


def only_first(frames: np.ndarray, _: int) -> np.ndarray:
    """Return the first frame, as often as there are frames."""
    return np.repeat(frames[:1], len(frames), axis=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """transformers' own model and the tokenizer of a checkpoint."""

    # Types of transformers refuse what its own documentation shows: media among the arguments of `generate`.
    model: Any
    tokenizer: Any

    @classmethod
    def open(cls, folder: Path) -> Reference:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        return cls(model=model.eval(), tokenizer=PreTrainedTokenizerFast.from_pretrained(str(folder)))

    def answers(
        self, pairs: Pairs, change: Callable[[np.ndarray, int], np.ndarray] | None = None
    ) -> list[str]:
        """Return an answer to each question, greedily; `change` is applied to the frames of videos."""
        found = [""] * len(pairs)
        for medium in scenes.MEDIA:
            places = [at for at, (scene, _) in enumerate(pairs) if scene.medium == medium]
            for first in range(0, len(places), BATCH):
                some = places[first : first + BATCH]
                frames = [pairs[at][0].frames for at in some]
                if change and medium == "video":
                    frames = [change(each, at) for each, at in zip(frames, some, strict=True)]
                made = self._generate(medium, np.stack(frames), [pairs[at][1].prompt for at in some])
                for at, answer in zip(some, made, strict=True):
                    found[at] = answer
        return found

    @torch.inference_mode()
    def _generate(self, medium: str, frames: np.ndarray, prompts: Sequence[str]) -> list[str]:
        patches = patches_of(frames)
        steps = len(patches) // len(frames)
        pad = f"<|{medium}_pad|>"
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": [{"type": medium}, {"type": "text", "text": prompt}]}],
                tokenize=False,
                add_generation_prompt=True,
            ).replace(pad, pad * (steps * CELLS))
            for prompt in prompts
        ]
        given = self.tokenizer(texts, return_tensors="pt", padding=True)
        ids = given["input_ids"]
        slot = self.tokenizer.convert_tokens_to_ids(pad)
        grids = torch.tensor([[steps, *PATCHES]] * len(frames))
        media: dict[str, object] = {f"{medium}_grid_thw": grids}
        media["pixel_values" if medium == "image" else "pixel_values_videos"] = patches.flatten(0, 1)
        if medium == "video":
            media["second_per_grid_ts"] = [MERGE / scenes.FRAMES_PER_SECOND] * len(frames)
        made = self.model.generate(
            ids,
            attention_mask=given["attention_mask"],
            mm_token_type_ids=(ids == slot).int() * (1 if medium == "image" else 2),
            max_new_tokens=LONGEST,
            do_sample=False,
            **media,
        )
        return [
            text.strip()
            for text in self.tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
        ]


def guesses(pairs: Pairs) -> list[str]:
    """Return the commonest answer to each prompt among other questions."""
    known: dict[str, Counter[str]] = defaultdict(Counter)
    for _, question in scenes.held_out(GUESSER_SEED, GUESSER_SHARE * len(pairs)):
        known[question.prompt][question.answer] += 1
    return [
        known[question.prompt].most_common(1)[0][0] if known[question.prompt] else "" for _, question in pairs
    ]


def shares(pairs: Pairs, answers: Iterable[str]) -> dict[str, float]:
    """Return percentages of right answers: all, by kind, by category."""
    right: dict[str, list[bool]] = defaultdict(list)
    for (scene, question), answer in zip(pairs, answers, strict=True):
        for name in ("all", scene.kind, question.category):
            right[name].append(answer == question.answer)
    return {name: round(100 * float(np.mean(each)), 1) for name, each in right.items()}


def evaluate(folder: Path, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Return percentages of right answers by who gives them."""
    pairs = list(scenes.held_out(seed, count))
    reference = Reference.open(folder)
    return {
        "transformers": shares(pairs, reference.answers(pairs)),
        "frames shuffled": shares(pairs, reference.answers(pairs, shuffled)),
        "first frame alone": shares(pairs, reference.answers(pairs, only_first)),
        "prompt alone": shares(pairs, guesses(pairs)),
    }
