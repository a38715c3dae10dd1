"""The whole workflow, offline: checkpoint, bundle, check, embeddings of media, an answered question."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport._build import build_checkpoint, request
from vlexport.backends import Progress
from vlexport.bundle.os_errors import shortage
from vlexport.checkpoint import Checkpoint, CheckpointContents
from vlexport.checkpoint.writing import write_checkpoint
from vlexport.errors import RequestError
from vlexport.parity.report import summary_of
from vlexport.recipe import find_recipe, list_recipes
from vlexport.report.overlay import write_sheet
from vlexport.runtime.outputs import Answer, provenance, save
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request

if TYPE_CHECKING:
    import numpy as np

FRAMES_PER_SECOND = 2.0
SEED = 0
DROPPED, ANSWER_LENGTH = 0.5, 24
QUESTIONS = {"image": "What is in this image?", "video": "What moves in this video?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Results of the demo and their paths; families of images only have no video."""

    checkpoint: Path
    bundle: Path
    cached: bool
    parity: str
    summary: str
    image: Path
    video: Path | None
    embeddings: Path
    tensors: dict[str, list[int]]
    answer: str
    kept: tuple[int, int]
    picture: Path

    def lines(self) -> list[str]:
        """Return the results as lines of text."""
        done = "found again, nothing to build (cache hit)" if self.cached else "built and stored"
        shapes = [f"    {name} {shape}" for name, shape in self.tensors.items()]
        media = ", ".join(str(path) for path in (self.image, self.video) if path)
        kind = "video" if self.video else "image"
        return [
            f"checkpoint  {self.checkpoint}  (tiny, random weights)",
            f"bundle      {self.bundle}  ({done})",
            f"parity      {self.summary}  (against the reference; `vlexport parity` repeats it)",
            f"media       {media}",
            f"tokens      {self.embeddings}",
            *shapes,
            f"question    {QUESTIONS[kind]} ({self.kept[0]} of {self.kept[1]} {kind} tokens kept)",
            f"answer      {json.dumps(self.answer, ensure_ascii=False)}  (random weights know no better)",
            f"picture     {self.picture}  (what was kept is bright)",
            f"next        vlexport inspect {self.bundle}",
        ]


def default_recipe() -> str:
    """Return the name of the default demo recipe."""
    name: str = importlib.import_module("vlexport.recipes.demo").DEFAULT_RECIPE
    return name


def run_demo(recipe: str, folder: Path, into: Path, backend: str, progress: Progress) -> Demo:
    """Write a tiny random checkpoint, build and check a bundle, encode media, answer a question."""
    _make_folder(folder)
    checkpoint = Checkpoint.open(_checkpoint(recipe, folder / f"{recipe}-checkpoint"))
    built = build_checkpoint(request(checkpoint, recipe=recipe, backend=backend, into=into), progress)
    bundle = built.require_passed()
    image, video = folder / "image.png", None
    _write_image(image)
    if _takes_videos(checkpoint, recipe):
        video = folder / "video.npy"
        _write_video(video)
    videos = [video] if video else []
    progress("encode and answer", 0.0)
    picture = folder / "kept.png"
    with load(bundle.path, decoder=checkpoint) as pipeline:
        items = pipeline.encode(images=[image], videos=videos, fps=FRAMES_PER_SECOND)
        answer = _answer(pipeline, image, video, picture)
    embeddings = folder / "embeddings.safetensors"
    return Demo(
        checkpoint=checkpoint.path,
        bundle=bundle.path,
        cached=built.cached,
        parity=bundle.verdict.status,
        summary=summary_of(bundle.verdict),
        image=image,
        video=video,
        embeddings=embeddings,
        tensors=save(dict(zip(("image.0", "video.0"), items, strict=False)), embeddings, provenance(bundle)),
        answer=answer.text,
        kept=(answer.media[0].num_kept, answer.media[0].num_tokens),
        picture=picture,
    )


def _takes_videos(checkpoint: Checkpoint, recipe: str) -> bool:
    made = find_recipe(recipe)
    mixes = made.shape_sets(made.read_config(checkpoint)).values()
    return any(kind == "video" for mix in mixes for kind, _ in mix)


def _answer(pipeline: Pipeline, image: Path, video: Path | None, picture: Path) -> Answer:
    """Answer a question about the video, pruned by half where the family supports it; draw the mask.

    Families that take no videos are questioned about the image.
    """
    request = Request(
        prompt=QUESTIONS["video" if video else "image"],
        images=[] if video else [image],
        videos=[video] if video else [],
        fps=FRAMES_PER_SECOND if video else None,
        prune=DROPPED if pipeline.recipe.pruning_rule else None,
        generation=Generation(max_new_tokens=ANSWER_LENGTH),
    )
    answer = pipeline.generate(request)
    write_sheet(picture, answer, request, pipeline)
    return answer


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise shortage(error, folder.parent) or RequestError(
            f"--folder {folder}: cannot be made ({error.strerror}); a folder that you may write to is "
            "expected. Name another one."
        ) from error


def _checkpoint(recipe: str, folder: Path) -> Path:
    """Return the stored checkpoint, or write it; the same seed gives the same weights."""
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
    """Write an image of soft rings on a gradient: no two patches are equal."""
    from PIL import Image

    Image.fromarray(_rings(140, 196, 0.0)).save(path)


def _write_video(path: Path) -> None:
    """Write a video: the rings drift from frame to frame while the right half is static."""
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
