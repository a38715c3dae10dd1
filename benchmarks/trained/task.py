"""Held-out questions as a task file for `vlexport sweep --task`, and the scene that `vlexport demo` shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.trained import scenes

# Training draws its scenes elsewhere, whatever its seed.
HELD_OUT_SEED, HELD_OUT_COUNT = 1, 2000
# Where the package has what the demo shows.
SHOWN = Path(__file__).parents[2] / "recipes" / "demo" / "trained" / "scene"


def write_task(folder: Path, count: int, seed: int, kinds: Sequence[str] = tuple(scenes.QUESTIONS)) -> Path:
    """Write pictures, videos and the questions about them; return the file of questions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (scene, question) in enumerate(scenes.held_out(seed, count, kinds)):
        name = f"{number:05d}.{'png' if scene.medium == 'image' else 'npy'}"
        if scene.medium == "image":
            Image.fromarray(scene.frames[0]).save(folder / name)
        else:
            np.save(folder / name, scene.frames)
        line = {
            "id": f"{number:05d}",
            "prompt": question.prompt,
            "answer": question.answer,
            "category": question.category,
            "choices": question.choices,
            scene.medium: name,
        }
        lines.append({**line, "fps": scenes.FRAMES_PER_SECOND} if scene.medium == "video" else line)
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_shown(folder: Path) -> None:
    """Write a held-out picture, a held-out video with its frames in a column, and a question about it."""
    folder.mkdir(parents=True, exist_ok=True)
    still, moving = (scenes.draw_scene(kind, HELD_OUT_SEED, 0) for kind in ("image", "video"))
    Image.fromarray(still.frames[0]).save(folder / "image.png")
    Image.fromarray(moving.frames.reshape(-1, scenes.WIDTH, 3)).save(folder / "frames.png", optimize=True)
    question = moving.questions[0]
    values = {"frames": len(moving.frames), "prompt": question.prompt, "answer": question.answer}
    (folder / "question.json").write_text(json.dumps(values) + "\n", encoding="utf-8")
