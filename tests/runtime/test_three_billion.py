"""A checkpoint with the sizes of the released model of three billion weights, built and run by commands.

`python -m tests.runtime.test_three_billion FOLDER` writes random bfloat16 weights (7.5 GB) and a bundle into
the folder where they are not there yet, answers about an image and a pruned video, prints what each took.
The test takes minutes, 10 GB of disk, and all cores of the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.towers import THREE_BILLION

NUM_NEW = 8
SIDE, FRAMES = 448, 8
# The machine that it must fit; what was measured stands in docs/runtime.md.
MEMORY = 24 * 2**30


@dataclass(frozen=True)
class Took:
    """A command's exit code, seconds, most resident bytes, and what it printed."""

    code: int
    seconds: float
    peak: int
    out: str
    err: str


def vlexport(*words: object) -> Took:
    """Run the command in a process of its own, and follow its peak until it ends.

    The kernel's VmHWM begins anew at exec, while ru_maxrss of a child starts at its parent's size.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = time.monotonic()
        command = [str(Path(sys.executable).with_name("vlexport")), *map(str, words)]
        process, peak = subprocess.Popen(command, stdout=out, stderr=err), 0
        while process.poll() is None:
            peak = max(peak, *map(resident_peak, descendants(process.pid)))
            time.sleep(0.02)
        seconds = time.monotonic() - started
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return Took(process.returncode, seconds, peak, *texts)


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in descendants(int(child)))]


def resident_peak(pid: int) -> int:
    """Return the most bytes that a process has held since its exec; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def write(folder: Path) -> Path:
    """The checkpoint, in nine shards."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        write_checkpoint(checkpoint, contents(THREE_BILLION), shards=9)
    return checkpoint


def build(folder: Path, checkpoint: Path) -> Took:
    words = ("--backend", "onnxruntime", "--output-dir", folder / "engines")
    return vlexport("build", checkpoint, *words)


def run_question(folder: Path, checkpoint: Path, bundle: Path, kind: str) -> Took:
    """About a picture, or about a video of which half is dropped."""
    random = np.random.default_rng(0)
    words: tuple[object, ...]
    if kind == "image":
        words = ("--image", folder / "image.png")
        Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(words[1])
    else:
        words = ("--video", folder / "video.npy", "--fps", 2, "--prune", 0.5)
        np.save(words[1], random.integers(0, 256, (FRAMES, SIDE, SIDE, 3), dtype=np.uint8))
    rest = ("--prompt", "What is here?", "--max-new-tokens", NUM_NEW, "--json")
    return vlexport("run", bundle, "--checkpoint", checkpoint, *words, *rest)


def measure(folder: Path) -> dict[str, Any]:
    """Everything, by command."""
    checkpoint = write(folder)
    built = build(folder, checkpoint)
    found: dict[str, Any] = {"build": asdict(built)}
    if built.code == 0:
        bundle = Path(built.out.splitlines()[-1])
        found |= {kind: asdict(run_question(folder, checkpoint, bundle, kind)) for kind in ("image", "video")}
    return found


@pytest.mark.full
def test_a_model_of_three_billion_weights_answers_within_the_memory_of_the_machine(tmp_path):
    found = measure(tmp_path)
    assert {name: took["code"] for name, took in found.items()} == {"build": 0, "image": 0, "video": 0}, found
    for kind, num_tokens, num_kept in (("image", 256, 256), ("video", 1024, 512)):
        took, answer = found[kind], json.loads(found[kind]["out"])
        print(f"{kind}: {took['peak'] / 2**30:.1f} GiB at most, {took['seconds']:.0f} s, {answer['stages']}")
        assert [(item["tokens"], item["kept"]) for item in answer["media"]] == [(num_tokens, num_kept)]
        assert len(answer["token_ids"]) == NUM_NEW
        assert took["peak"] < MEMORY


if __name__ == "__main__":
    json.dump(measure(Path(sys.argv[1])), sys.stdout, indent=1)
