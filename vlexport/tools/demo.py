"""The whole workflow, offline: checkpoint, bundle, check, embeddings, an answered question, a report.

One recipe's checkpoint is trained (docs/trained.md): it meets a video of its kind, and its answer is right.
Those of the others have random weights.
"""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.backends import Progress
from vlexport.checkpoint import Checkpoint
from vlexport.errors import RequestError
from vlexport.recipe import find_recipe, list_recipes
from vlexport.recipes.demo.writing import write_checkpoint
from vlexport.reports.facts import BundleFacts
from vlexport.reports.measure import Measurement
from vlexport.reports.overlay import write_sheet
from vlexport.reports.page import page
from vlexport.reports.results import Results
from vlexport.runtime.outputs import Answer, provenance, save
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request
from vlexport.system import replacing, shortage

if TYPE_CHECKING:
    import numpy as np

FRAMES_PER_SECOND = 2.0
SEED = 0
DROPPED, ANSWER_LENGTH = 0.5, 24
# Of the report, in seconds.
ROUNDS, RATES = 3, (0.0, 0.5, 0.9)
QUESTIONS = {"image": "What is in this image?", "video": "What moves in this video?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Results of the demo and their paths; `expected`, the right answer, is known for trained weights."""

    checkpoint: Path
    bundle: Path
    cached: bool
    parity: str
    summary: str
    image: Path
    video: Path | None
    embeddings: Path
    tensors: dict[str, list[int]]
    question: str
    answer: str
    expected: str | None
    kept: tuple[int, int]
    picture: Path
    report: Path

    def lines(self) -> list[str]:
        done = "found again, nothing to build (cache hit)" if self.cached else "built and stored"
        shapes = [f"    {name} {shape}" for name, shape in self.tensors.items()]
        media = ", ".join(str(path) for path in (self.image, self.video) if path)
        kind = "video" if self.video else "image"
        if self.expected is None:
            weights, judged = "random weights", "random weights know no better"
        else:
            weights = "trained, see docs/trained.md"
            judged = "right" if self.answer == self.expected else f"wrong, {self.expected} is right"
        return [
            f"checkpoint  {self.checkpoint}  (tiny, {weights})",
            f"bundle      {self.bundle}  ({done})",
            f"parity      {self.summary}  (against the reference; `vlexport check --accuracy` repeats it)",
            f"media       {media}",
            f"tokens      {self.embeddings}",
            *shapes,
            f"question    {self.question} ({self.kept[0]} of {self.kept[1]} {kind} tokens kept)",
            f"answer      {json.dumps(self.answer, ensure_ascii=False)}  ({judged})",
            f"picture     {self.picture}  (what was kept is bright)",
            f"report      {self.report}  (opens in a browser)",
            f"next        vlexport inspect {shlex.quote(str(self.bundle))}",
        ]


def default_recipe() -> str:
    """Return the name of the default demo recipe."""
    return str(importlib.import_module("vlexport.recipes.demo").DEFAULT_RECIPE)


def run_demo(recipe: str, folder: Path, into: Path, backend: str, progress: Progress) -> Demo:
    """Write a tiny checkpoint, build and check a bundle, encode media, answer a question, write a report."""
    _make_folder(folder)
    checkpoint = Checkpoint.open(_checkpoint(recipe, folder))
    built = build_checkpoint(request(checkpoint, recipe=recipe, backend=backend, output_dir=into), progress)
    bundle = built.require_passed()
    shown = _media(recipe, folder) if _takes_videos(checkpoint, recipe) else _image_alone(folder)
    progress("encode and answer", 0.0)
    picture, report = folder / "kept.png", folder / "report.html"
    with load(bundle.path, checkpoint=checkpoint) as pipeline:
        items = pipeline.encode(images=[shown.image], videos=shown.videos, fps=FRAMES_PER_SECOND)
        answer = _answer(pipeline, shown, picture)
    measurement = Measurement(
        bundle=bundle,
        media=[shown.image, *shown.videos],
        fps=FRAMES_PER_SECOND,
        rounds=ROUNDS,
        rates=RATES,
        by_block=False,
    )
    checked, results = measurement.complete(Results(overlay=picture.read_bytes()), progress)
    with replacing(report) as temporary:
        temporary.write_text(page(checked, results), encoding="utf-8")
    embeddings, facts = folder / "embeddings.safetensors", BundleFacts.of(bundle)
    return Demo(
        checkpoint=checkpoint.path,
        bundle=bundle.path,
        cached=built.cached,
        parity=facts.status,
        summary=facts.summary,
        image=shown.image,
        video=shown.video,
        embeddings=embeddings,
        tensors=save(dict(zip(("image.0", "video.0"), items, strict=False)), embeddings, provenance(bundle)),
        question=shown.question,
        answer=answer.text.strip(),
        expected=shown.answer,
        kept=(answer.media[0].num_kept, answer.media[0].num_tokens),
        picture=picture,
        report=report,
    )


def _takes_videos(checkpoint: Checkpoint, recipe: str) -> bool:
    family = find_recipe(recipe)
    mixes = family.shape_sets(family.read_config(checkpoint)).values()
    return any(kind == "video" for mix in mixes for kind, _ in mix)


def _answer(pipeline: Pipeline, shown: Shown, picture: Path) -> Answer:
    request = Request(
        prompt=shown.question,
        images=[] if shown.video else [shown.image],
        videos=shown.videos,
        fps=FRAMES_PER_SECOND if shown.video else None,
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
    if (trained := _trained(recipe)) is not None:
        place = folder / f"{recipe}-trained"
        if not place.exists():
            unfinished = place.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(trained, unfinished)
            unfinished.rename(place)
        return place
    place = folder / f"{recipe}-checkpoint"
    if (place / "config.json").exists():
        return place
    return Path(write_checkpoint(place, _contents(recipe), seed=SEED))


def _trained(recipe: str) -> Path | None:
    folder = _trained_folder() / recipe
    return folder if folder.is_dir() else None


def _trained_folder() -> Path:
    return Path(importlib.import_module("vlexport.recipes.demo").__path__[0], "trained")


def _contents(recipe: str) -> Any:
    name = find_recipe(recipe).name
    try:
        return importlib.import_module(f"vlexport.recipes.demo.{name}").contents()
    except ModuleNotFoundError as error:
        shipped = ", ".join(card.name for card in list_recipes())
        raise RequestError(
            f"recipe '{name}' has no demo checkpoint. Shipped recipes: {shipped}; add recipes/demo/{name}.py."
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Media of the demo, and a question about the video, or else the image, with its answer where known."""

    image: Path
    video: Path | None
    question: str
    answer: str | None = None

    @property
    def videos(self) -> list[Path]:
        return [self.video] if self.video else []


def _media(recipe: str, folder: Path) -> Shown:
    """Write an image and a video: of what a trained checkpoint knows, else rings.

    The rings drift from frame to frame while the right half is static; no two patches are equal.
    """
    import numpy as np

    image, video = folder / "image.png", folder / "video.npy"
    if _trained(recipe) is None:
        frames = np.stack([_rings(112, 168, shift) for shift in np.linspace(0.0, 3.0, 9)])
        frames[:, :, 84:] = frames[:1, :, 84:]
        np.save(video, frames)
        return replace(_image_alone(folder), video=video, question=QUESTIONS["video"])
    from PIL import Image

    scene = _trained_folder() / "scene"
    question = json.loads((scene / "question.json").read_text(encoding="utf-8"))
    shutil.copyfile(scene / "image.png", image)
    with Image.open(scene / "frames.png") as column:
        np.save(video, np.asarray(column).reshape(question["frames"], -1, column.width, 3))
    return Shown(image=image, video=video, question=question["prompt"], answer=question["answer"])


def _image_alone(folder: Path) -> Shown:
    from PIL import Image

    image = folder / "image.png"
    Image.fromarray(_rings(140, 196, 0.0)).save(image)
    return Shown(image=image, video=None, question=QUESTIONS["image"])


def _rings(height: int, width: int, shift: float) -> np.ndarray:
    import numpy as np

    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    distance = np.hypot(y - height / 2, x - width / 3 - 4 * shift)
    wave = np.sin(distance / 9 + shift)
    bands = (127 + 120 * wave, 255 * x / width, 255 * y / height)
    return np.stack(bands, axis=-1).clip(0, 255).astype(np.uint8)
