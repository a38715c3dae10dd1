"""Everything that a case needs, loaded and used once, in the process that all cases are forked from."""

import os
import sys
import tempfile
from pathlib import Path

import onnxruntime  # noqa: F401  loaded once for all
import openvino  # noqa: F401
import torch

from tests.strangers.cases import write_image
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.cli import run

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch)
    checkpoint = write_tiny_qwen2_5_vl(folder / "tiny", depth=1)
    kept, kept_errors = os.dup(1), os.dup(2)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    built = ["build", str(checkpoint), "--backend", "eager", "--output-dir", str(folder / "engines")]
    codes = [run(built)]
    sys.stdout.flush()
    bundle = next(path for path in (folder / "engines").iterdir() if not path.name.startswith("."))
    image = write_image(folder / "image.png")
    asked = ["--decoder", str(checkpoint), "--prompt", "?", "--image", str(image), "--max-new-tokens", "2"]
    codes += [run(["run", str(bundle), *asked]), run(["parity", str(bundle)]), run(built)]
    sys.stdout.flush()
    os.dup2(kept, 1)
    os.dup2(kept_errors, 2)
    assert codes == [0, 0, 0, 0], (folder / "log").read_text()
