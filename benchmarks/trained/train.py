"""Training from random weights.

Batches follow from the seed and the number of the step, so a training that was cut off goes on where it was.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.trained import scenes
from benchmarks.trained.model import CELLS, IGNORED, Batch, TrainedModel

# 50 minutes of one core, 25 of two.
STEPS = 3000
# Images and videos of one step, and questions about each of them.
SCENES, QUESTIONS, LENGTH = {"image": 32, "video": 16}, 8, 16
PEAK, WARM_UP, DECAY = 2e-3, 100, 0.05
# Scenes grow to their full number of things over this share of the steps.
GROWTH = 0.1
SAVE_EVERY, LOG_EVERY = 50, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """All that the batches of a step follow from."""

    seed: int
    step: int
    crowd: int = scenes.MOST


def make_batch(trained: TrainedModel, medium: str, moment: Moment) -> tuple[Batch, list[list[str]]]:
    """Return the batch of a step, the kinds of this medium in turn, and the categories of its questions."""
    count, kinds = SCENES[medium], scenes.MEDIA[medium]
    ids = torch.full((count, QUESTIONS, LENGTH), trained.specials["<|endoftext|>"])
    targets = torch.full_like(ids, IGNORED)
    steps = scenes.STEPS if medium == "video" else 1
    shapes, colours, events = np.zeros((3, count, steps, CELLS), dtype=np.int64)
    frames, categories = [], []
    for at in range(count):
        number = moment.step * count + at
        # Numbers below a million are held out.
        scene = scenes.draw_scene(kinds[at % len(kinds)], moment.seed, 1_000_000 + number, moment.crowd)
        frames.append(scene.frames)
        for second, things in enumerate(scene.things):
            for thing in things:
                cell = thing.cell[0] * scenes.COLUMNS + thing.cell[1]
                shapes[at, second, cell], colours[at, second, cell] = thing.shape + 1, thing.colour + 1
                events[at, second, cell] = thing not in scene.things[0]
        chosen = _spread(scene.questions, number)
        categories.append([each.category for each in chosen])
        for place, question in enumerate(chosen):
            prompt_ids, answer = trained.question_ids(question.prompt, question.answer)
            full = prompt_ids + answer
            ids[at, place, : len(full)] = torch.tensor(full)
            targets[at, place, len(prompt_ids) - 1 : len(full) - 1] = torch.tensor(answer)
    made = Batch(
        medium=medium,
        frames=np.stack(frames),
        ids_BQL=ids,
        targets_BQL=targets,
        shapes_BS=torch.from_numpy(shapes),
        colours_BS=torch.from_numpy(colours),
        events_BS=torch.from_numpy(events),
    )
    return made, categories


def _spread(questions: tuple[scenes.Question, ...], number: int) -> list[scenes.Question]:
    """Return some of the questions, of all categories in turn."""
    rng = np.random.Generator(np.random.PCG64([number, 3]))
    left: dict[str, list[scenes.Question]] = defaultdict(list)
    for at in rng.permutation(len(questions)):
        left[questions[at].category].append(questions[at])
    chosen: list[scenes.Question] = []
    while len(chosen) < QUESTIONS and any(left.values()):
        chosen += [each.pop() for each in left.values() if each]
    return chosen[:QUESTIONS]


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a linear start, then half a cosine to zero."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    return PEAK * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP)))


def train(
    folder: Path, show: Callable[[str], None], *, seed: int = 0, steps: int = STEPS, stop: int | None = None
) -> None:
    """Train to a step, or go on from `FOLDER/training/state.pt`; `curve.jsonl` beside it has the losses."""
    end = min(steps, stop or steps)
    torch.manual_seed(seed)
    trained = TrainedModel(folder)
    trained.initialise(seed)
    weights = [*trained.model.parameters(), *trained.reader.parameters()]
    groups = [
        {"params": [each for each in weights if each.ndim > 1], "weight_decay": DECAY},
        {"params": [each for each in weights if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98))
    (folder / "training").mkdir(exist_ok=True)
    state_path, curve = folder / "training" / "state.pt", folder / "training" / "curve.jsonl"
    first, spent = 0, 0.0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        trained.model.load_state_dict(state["model"])
        trained.reader.load_state_dict(state["reader"])
        optimizer.load_state_dict(state["optimizer"])
        first, spent = state["step"], state["cpu_s"]
    tally: dict[str, list[int]] = defaultdict(list)
    losses: dict[str, list[float]] = defaultdict(list)
    begun = time.process_time()
    cores = ThreadPoolExecutor(len(scenes.MEDIA), initializer=torch.set_num_threads, initargs=(1,))
    for step in range(first, end):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        crowd = min(scenes.MOST, 2 + int(6 * step / (GROWTH * steps)))
        moment = Moment(seed=seed, step=step, crowd=crowd)
        # A core each: images and videos take about as long.
        sides = [cores.submit(one_side, trained, weights, medium, moment) for medium in scenes.MEDIA]
        for medium, side in zip(scenes.MEDIA, sides, strict=True):
            loss, aid, right, gradients = side.result()
            losses[medium].append(loss)
            losses[f"{medium} cells"].append(aid)
            for name, good in right:
                tally[name].append(good)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0:
            line = {
                "step": step + 1,
                "cpu_s": round(spent + time.process_time() - begun),
                "loss": {name: round(float(np.mean(each)), 3) for name, each in losses.items()},
                "right": {name: round(float(np.mean(each)), 3) for name, each in tally.items()},
            }
            with curve.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            show(json.dumps(line))
            tally.clear()
            losses.clear()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == end:
            state = {
                "model": trained.model.state_dict(),
                "reader": trained.reader.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "cpu_s": spent + time.process_time() - begun,
            }
            torch.save(state, state_path.with_suffix(".new"))
            state_path.with_suffix(".new").replace(state_path)
            trained.save()
    cores.shutdown()


def one_side(
    trained: TrainedModel, weights: Sequence[Tensor], medium: str, moment: Moment
) -> tuple[float, float, list[tuple[str, bool]], tuple[Tensor, ...]]:
    """Return losses of the images or videos of a step, which answers were right, and the gradients."""
    batch, categories = make_batch(trained, medium, moment)
    loss, aid, right = trained.loss(batch)
    answers = [
        (name, good)
        for row, names in zip(right.tolist(), categories, strict=True)
        for good, name in zip(row, names, strict=False)
    ]
    return loss.item(), aid.item(), answers, torch.autograd.grad(loss + aid, weights)
