"""The whole line, offline: checkpoint, bundle, check, tokens of an image and a video."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.build import Progress, build_checkpoint, request
from vlexport.bundle.shortage import shortage
from vlexport.checkpoint import Checkpoint, CheckpointContents
from vlexport.demo_checkpoint import write_checkpoint
from vlexport.errors import RequestError
from vlexport.recipe import find_recipe, list_recipes
from vlexport.runtime.encoding import save
from vlexport.runtime.pipeline import load

if TYPE_CHECKING:
    import numpy as np

FRAMES_PER_SECOND = 2.0
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What the demo made, and where it lies."""

    checkpoint: Path
    bundle: Path
    cached: bool
    parity: str
    image: Path
    video: Path
    embeddings: Path
    tensors: dict[str, list[int]]

    def to_json(self) -> dict[str, object]:
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()
        }

    def lines(self) -> list[str]:
        """What was done and where it lies, for people."""
        done = "found again, nothing to build (cache hit)" if self.cached else "built and stored"
        shapes = [f"    {name} {shape}" for name, shape in self.tensors.items()]
        return [
            f"checkpoint  {self.checkpoint}  (tiny, random weights)",
            f"bundle      {self.bundle}  ({done})",
            f"parity      {self.parity}  (against the reference; `vlexport parity` repeats it)",
            f"media       {self.image}, {self.video}",
            f"tokens      {self.embeddings}",
            *shapes,
            f"next        vlexport inspect {self.bundle}",
        ]


def run_demo(recipe: str, folder: Path, into: Path, backend: str, progress: Progress) -> Demo:
    """Write a tiny random checkpoint, build and check a bundle from it, encode an image and a video."""
    _make_folder(folder)
    checkpoint = Checkpoint.open(_checkpoint(recipe, folder / f"{recipe}-checkpoint"))
    built = build_checkpoint(request(checkpoint, recipe=recipe, backend=backend, into=into), progress)
    bundle = built.require_passed()
    image, video = folder / "image.png", folder / "video.npy"
    _write_image(image)
    _write_video(video)
    progress("encode", 0.0)
    with load(bundle.path) as pipeline:
        items = pipeline.encode(images=[image], videos=[video], fps=FRAMES_PER_SECOND)
    embeddings = folder / "embeddings.safetensors"
    return Demo(
        checkpoint=checkpoint.path,
        bundle=bundle.path,
        cached=built.cached,
        parity=bundle.manifest.parity.status,
        image=image,
        video=video,
        embeddings=embeddings,
        tensors=save(items, embeddings),
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise shortage(error, folder.parent) or RequestError(
            f"--folder {folder}: cannot be made ({error.strerror}); a folder that you may write to is "
            "expected. Name another one."
        ) from error


def _checkpoint(recipe: str, folder: Path) -> Path:
    """The one from last time if it is there: the same seed writes the same weights."""
    if (folder / "config.json").exists():
        return folder
    return write_checkpoint(folder, _contents(recipe)(), seed=SEED)


def _contents(recipe: str) -> Callable[[], CheckpointContents]:
    name = find_recipe(recipe).name
    try:
        found: Callable[[], CheckpointContents] = importlib.import_module(
            f"vlexport.recipes.demo.{name}"
        ).contents
    except ModuleNotFoundError as error:
        known = ", ".join(card.name for card in list_recipes())
        raise RequestError(
            f"recipe '{name}' has no demo checkpoint. Shipped recipes: {known}; add recipes/demo/{name}.py."
        ) from error
    return found


def _write_image(path: Path) -> None:
    """Soft rings on a slope: something to see, and no two patches alike."""
    from PIL import Image

    Image.fromarray(_rings(140, 196, 0.0)).save(path)


def _write_video(path: Path) -> None:
    """The rings drift from frame to frame while the right half stands still."""
    import numpy as np

    frames = np.stack([_rings(112, 168, shift) for shift in np.linspace(0.0, 3.0, 9)])
    frames[:, :, 84:] = frames[:1, :, 84:]
    np.save(path, frames)


def _rings(height: int, width: int, shift: float) -> np.ndarray:
    import numpy as np

    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    distance = np.hypot(y - height / 2, x - width / 3 - 4 * shift)
    wave = np.sin(distance / 9 + shift)
    bands = (127 + 120 * wave, 255 * x / width, 255 * y / height)
    return np.stack(bands, axis=-1).clip(0, 255).astype(np.uint8)
