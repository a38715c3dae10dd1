"""Held-out questions as a task file, which `vlexport sweep --task` reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image
from vlexport.recipes.demo import scenes

# Training draws its scenes elsewhere, whatever its seed.
HELD_OUT_SEED, HELD_OUT_COUNT = 1, 2000


def write_task(folder: Path, count: int, seed: int) -> Path:
    """Write pictures, videos and the questions about them; return the file of questions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (scene, question) in enumerate(scenes.held_out(seed, count)):
        name = f"{number:05d}.{'png' if scene.kind == 'image' else 'npy'}"
        if scene.kind == "image":
            Image.fromarray(scene.frames[0]).save(folder / name)
        else:
            np.save(folder / name, scene.frames)
        line = {
            "id": f"{number:05d}",
            "prompt": question.prompt,
            "answer": question.answer,
            "category": question.category,
            "choices": question.choices,
            scene.kind: name,
        }
        lines.append({**line, "fps": scenes.FRAMES_PER_SECOND} if scene.kind == "video" else line)
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
