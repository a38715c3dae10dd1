"""Tiny random models with their language models: tokens with an engine attached, against their own tower."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.classes import (
    BEGIN,
    END,
    PAGE,
    REACHES,
    RESULTS,
    SECONDS,
    limited,
    page,
    random_state,
    reason,
    shrunk,
    write_pixels,
)
from benchmarks.tables import write_between, write_whole
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import VlexportError
from vlexport.recipe import served_types
from vlexport.runtime.attached import attach
from vlexport.vision.features.classes import feature_class
from vlexport.vision.features.tower import first, one

# Logits of a step may differ so much, relatively.
NEAR = 1e-4
TOKENS = 8
IMAGE = ("image_token_id", "image_token_index", "im_patch_id", "img_context_token_id")
VIDEO = ("video_token_id", "video_token_index")


def whole_model(model_type: str, folder: Path) -> Any:
    """Return a tiny random model with its language model, as it is read from a checkpoint in the folder."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

    for auto in (AutoModelForImageTextToText, AutoModel):
        for wanted, layers in REACHES:
            try:
                config = shrunk(AutoConfig.for_model(model_type), wanted, layers)
                _fit(config)
                factory: Any = auto
                model = factory.from_config(config)
            except Exception as error:  # noqa: BLE001  configurations raise errors of their own
                problem = error
                continue
            state = random_state(model)
            model.load_state_dict({**model.state_dict(), **state})
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(folder)
            kind = feature_class(model_type)
            assert kind is not None
            owner = next((part for part in model.modules() if type(part) is kind[0]), None)
            if owner is None:
                raise VlexportError(f"{type(model).__name__} has no {kind[0].__name__}")
            write_pixels(folder, owner)
            return type(model).from_pretrained(folder).eval()
    raise problem


def _fit(config: Any) -> None:
    """Fit rotary sections, tokens and sizes of tiled pictures to a tiny model."""
    for name in getattr(config, "sub_configs", {}):
        if hasattr(part := getattr(config, name, None), "to_dict"):
            _fit(part)
    rotary = getattr(config, "rope_parameters", None)
    has_sections = any(name in config.model_type for name in ("qwen", "glm", "exaone", "omni"))
    if rotary and "rope_theta" in rotary and has_sections:
        heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(heads * rotary.get("partial_rotary_factor", 1.0)) // 2
        rotary["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    most = getattr(getattr(config, "text_config", config), "vocab_size", None)
    for number, name in enumerate((*IMAGE, *VIDEO)):
        if most and (getattr(config, name, None) or 0) >= most:
            setattr(config, name, most - 1 - number)
    if getattr(config, "image_grid_pinpoints", None):
        side = config.vision_config.image_size
        side = side[0] if isinstance(side, list | tuple) else side
        config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]


def build(folder: Path, recipe: str | None = None, backend: str = "onnxruntime") -> Bundle:
    """Build the checkpoint in a folder."""
    spec = request(Checkpoint.open(folder), recipe=recipe, backend=backend, into=folder / "engines")
    built = build_checkpoint(spec, lambda *_: None)
    built.require_passed()
    return built.bundle


def owner_of(model: Any) -> Any:
    """Return the part of a model that has the features."""
    kind = feature_class(model.config.model_type)
    assert kind is not None
    return next(part for part in model.modules() if type(part) is kind[0])


def pixels_of(owner: Any, images: int, *, video: bool = False) -> dict[str, Tensor]:
    """Return random pixels of images of other sizes, or of a video, as the class takes them."""
    generator = torch.Generator().manual_seed(images + 10 * video)
    taken = inspect.signature(owner.get_image_features).parameters
    patch: Any
    side: Any
    patch, side = one(first(owner, "patch_size")), one(first(owner, "image_size"))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if "image_grid_thw" in taken:
        merge, temporal = first(owner, "spatial_merge_size"), first(owner, "temporal_patch_size") or 1
        grids = [(2 if video else 1, merge * (2 + number), merge * 3) for number in range(images)]
        rows = noise(sum(t * h * w for t, h, w in grids), 3 * temporal * patch**2)
        kind = "video" if video else "image"
        return {
            "pixel_values_videos" if video else "pixel_values": rows,
            f"{kind}_grid_thw": torch.tensor(grids),
        }
    if "image_sizes" in taken and first(owner, "patch_positional_embedding") is not None:
        cell = patch * (getattr(owner.config, "spatial_merge_size", 1))
        sizes = torch.tensor([(cell * (2 + number), cell * 3) for number in range(images)])
        return {"pixel_values": noise(images, 3, *sizes.amax(0).tolist()), "image_sizes": sizes}
    if video:
        return {"pixel_values_videos": noise(images, 3, 3, side, side)}
    if hasattr(owner, "pack_image_features"):
        sizes = torch.tensor([(side, side * (1 + number)) for number in range(images)])
        return {"pixel_values": noise(images, 16, 3, side, side), "image_sizes": sizes}
    if hasattr(owner, "connector") and "pixel_attention_mask" in taken:
        return {"pixel_values": noise(1, images, 3, side, side)}
    return {"pixel_values": noise(images, 3, side, side)}


def prompts(
    model: Any,
    pixels: Mapping[str, Tensor],
    batch: int = 1,
    *,
    frames: int = 1,
    names: tuple[str, ...] = IMAGE,
) -> dict[str, Tensor]:
    """Return a call of `generate`: text round as many tokens of each image as the class gives rows."""
    owner = owner_of(model)
    video = any("video" in name for name in pixels)
    method = owner.get_video_features if video else owner.get_image_features
    taken = inspect.signature(method).parameters
    with torch.inference_mode():
        rows = method(**{key: value for key, value in pixels.items() if key in taken}).pooler_output
    counts = [part.numel() // part.shape[-1] for part in rows for _ in range(frames)]
    token = _token(model.config, names)
    parts = [[11, 12, 13, *[token] * (count // frames), 14] for count in counts]
    each = len(parts) // batch
    texts = [list(chain(*parts[start : start + each])) for start in range(0, len(parts), each)]
    ids = torch.tensor(texts)
    marks = (ids == token).long()
    taken = inspect.signature(owner.forward).parameters
    further = {"mm_token_type_ids": marks * (2 if video else 1), "token_type_ids": marks}
    pixel_name = "pixel_values" if "pixel_values" in taken else "pixel_values_images"
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **{pixel_name if key == "pixel_values" else key: value for key, value in pixels.items()},
        **{key: value for key, value in further.items() if key in taken},
    }


def _token(config: Any, names: tuple[str, ...]) -> int:
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    given = (value for part in parts for name in names if (value := getattr(part, name, None)) is not None)
    token = next(given, None)
    if token is None:
        raise VlexportError("its settings name no token of images: it writes no text")
    return int(token)


def calls_of(model: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield calls of every kind that the class takes, with their names."""
    owner = owner_of(model)
    yield "one image", prompts(model, pixels_of(owner, 1))
    yield "three images", prompts(model, pixels_of(owner, 3))
    two = pixels_of(owner, 2)
    if "image_grid_thw" in two:
        two["image_grid_thw"][1] = two["image_grid_thw"][0]
        two["pixel_values"] = two["pixel_values"][: 2 * int(two["image_grid_thw"][0].prod())]
    elif "image_sizes" in two:
        two["image_sizes"][1] = two["image_sizes"][0]
    elif two["pixel_values"].ndim == 5:
        two["pixel_values"] = two["pixel_values"].transpose(0, 1)
    yield "two prompts", prompts(model, two, batch=2)
    if hasattr(owner, "get_video_features"):
        yield "video", _video(model, pixels_of(owner, 1, video=True))


def _video(model: Any, pixels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a call with a video, its tokens as the class takes them: by frame or not, of images or not."""
    grids = pixels.get("video_grid_thw")
    frames, problem = 1 if grids is None else int(grids[0, 0]), Exception()
    for number, names in ((1, VIDEO), (frames, VIDEO), (1, IMAGE), (frames, IMAGE)):
        call = prompts(model, pixels, frames=number, names=names)
        try:
            answers(model, call)
        except (RuntimeError, ValueError, IndexError, StopIteration) as error:
            problem = error
        else:
            return call
    raise problem


def answers(model: Any, call: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of a call, and tokens of a greedy answer."""
    with torch.inference_mode():
        logits = model(**call).logits
        tokens = model.generate(**call, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return logits, tokens


def attached(model_type: str, folder: Path, recipe: str | None = None) -> str:
    """Return `equal`, or what differs, of a model with its engine attached."""
    model = whole_model(model_type, folder)
    bundle = build(folder, recipe or (None if model_type in served_types() else "generic"))
    calls = dict(calls_of(model))
    own = {name: answers(model, call) for name, call in calls.items()}
    problems = []
    with attach(model, bundle) as engine:
        for name, call in calls.items():
            before = engine.session.num_calls
            logits, tokens = answers(model, call)
            error = float((logits - own[name][0]).norm() / own[name][0].norm())
            if engine.session.num_calls - before < 2:
                problems.append(f"{name}: the engine was not called")
            if error > NEAR or not torch.equal(tokens, own[name][1]):
                problems.append(f"{name}: logits differ by {error:.1e}")
    return "; ".join(problems) or "equal"


def main(names: list[str]) -> None:
    """Try the classes that export, all without names; write what came of each beside how it exports."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    classes = {each["model_type"]: each for each in stored["classes"]}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [name for name, each in classes.items() if each["exports"]]:
            try:
                with limited(SECONDS):
                    outcome = attached(name, Path(folder) / name)
            except Exception as problem:  # noqa: BLE001  classes raise errors of their own
                outcome = reason(problem, Path(folder))
            classes[name]["attach"] = outcome
            sys.stdout.write(f"{name}: {outcome}\n")
            sys.stdout.flush()
            write_whole(RESULTS, json.dumps(stored, indent=1) + "\n")
    write_between(PAGE, BEGIN, END, "\n".join(page(stored["classes"])))


if __name__ == "__main__":
    main(sys.argv[1:])
