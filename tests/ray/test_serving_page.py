"""The program for Ray Data on docs/serving.md: equal to one process, and every item once after kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.lines import vlexport
from tests.pages import ROOT, shown
from tests.runtime.recorded import CHECKPOINT

NUM_ITEMS, SHARD_ITEMS, SEED = 5000, 100, 21
# One picture in so many is damaged.
DAMAGED = 500


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a bundle, pictures, the page's program, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("desk")
    draw = np.random.default_rng(SEED)
    for at in range(NUM_ITEMS):
        path = folder / "photos" / f"{at // 1000}" / f"{at:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = draw.integers(28, 84, 2)
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        if at % DAMAGED == 7:
            path.write_bytes(path.read_bytes()[:60])
    built = vlexport("build", CHECKPOINT, "--output-dir", folder / "engines")
    assert built.code == 0, built.err
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    (program,) = [code for kind, code in shown(page) if kind == "python" and "import ray" in code]
    program = program.replace("engines/BUNDLE", built.lines[-1])
    (folder / "encode.py").write_text(program, "utf-8")
    words = ("--shard-items", SHARD_ITEMS, "--threads", 1, "--output-dir", folder / "whole")
    ran = vlexport("encode", built.lines[-1], "--image", folder / "photos", *words)
    assert ran.code == 2, ran.err  # that of the damaged ones
    return folder


@pytest.fixture
def start(desk, monkeypatch):
    """Start the program; its processes end with it."""
    shutil.rmtree(desk / "features", ignore_errors=True)
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    return lambda: subprocess.Popen(
        [sys.executable, "encode.py"], cwd=desk, env=os.environ | settings, stdout=subprocess.PIPE, text=True
    )


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def require_equal(desk: Path) -> None:
    names = [path.name for path in shards(desk / "whole")]
    assert len(names) == NUM_ITEMS // SHARD_ITEMS
    for name in ("index.jsonl", "collection.json", *names):
        assert (desk / "features" / name).read_bytes() == (desk / "whole" / name).read_bytes(), name
    records = [
        json.loads(line) for line in (desk / "features" / "index.jsonl").read_text("utf-8").splitlines()
    ]
    assert [record["item"] for record in records] == [f"item.{at}" for at in range(NUM_ITEMS)]
    assert sum(record["status"] == "error" for record in records) == NUM_ITEMS // DAMAGED


def test_two_workers_write_what_one_process_writes(desk, start):
    process = start()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert f"num_items={NUM_ITEMS}, num_failed={NUM_ITEMS // DAMAGED}" in out
    require_equal(desk)


def test_every_item_is_there_once_after_five_kills(desk, start):
    draw, killed = random.Random(SEED), list[int]()
    for _ in range(5):
        wanted = len(shards(desk / "features")) + draw.randint(1, 6)
        process = start()
        while len(shards(desk / "features")) < wanted and process.poll() is None:
            time.sleep(0.02)
        time.sleep(draw.random() / 5)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        killed.append(len(shards(desk / "features")))
    assert killed == sorted(set(killed))
    process = start()
    process.communicate(timeout=600)
    assert process.returncode == 0
    require_equal(desk)
