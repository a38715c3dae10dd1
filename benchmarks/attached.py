"""Tiny random models with their language models: tokens with an engine attached, against their own tower."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import vlexport
from benchmarks import classes
from benchmarks.memory import own as resident
from benchmarks.tables import write_whole
from vlexport._build.request import request
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError, VlexportError
from vlexport.recipe import served_types
from vlexport.runtime.attached import attach
from vlexport.system import give_back
from vlexport.vision.features.classes import feature_class, outputs_of, rows_and_levels
from vlexport.vision.features.pixels import PictureRule
from vlexport.vision.features.tower import MERGES, RASTER, first, one

# Logits of a step may differ so much, relatively.
NEAR = 1e-4
TOKENS = 8
# Of a whole model: 2 GB, which a build holds twice.
MOST_WEIGHTS = 500_000_000
# Why the engine of images has no rows of videos.
VIDEOS_APART = {
    "ernie4_5_vl_moe": "two frames give one row",
    "llava_next_video": "frames are pooled before the projector, which is in the engine",
    "video_llava": "they have a tower of their own, which is not in the bundle",
}  # fmt: skip
# Pixels that differ by 1e-6 change all eight tokens with their own tower too.
SAMPLED = {"diffusion_gemma": "logits equal; tokens are sampled anew in each step, and follow its rounding"}
JOINED = ("mistral_large4", "qianfan_ocr", "step3p7")
MARKS = {
    "vision_start_token_id": 13, "vision_end_token_id": 14,
    "video_start_token_id": 15, "video_end_token_id": 16,
}  # fmt: skip
IMAGE = ("image_token_id", "image_token_index", "im_patch_id", "img_context_token_id")
VIDEO = ("video_token_id", "video_token_index")


def whole_model(model_type: str, folder: Path) -> Any:
    """Return a tiny random model with its language model, as it is read from a checkpoint in the folder."""
    from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForMultimodalLM

    for auto in (AutoModelForMultimodalLM, AutoModelForMaskedLM, AutoModel):
        for wanted, layers in classes.REACHES:
            try:
                config = classes.tiny_config(model_type, wanted, layers)
                _fit(config)
                # As it is read: some sizes follow from others then.
                config, factory = type(config).from_dict(config.to_dict()), cast("Any", auto)
                with torch.device("meta"):
                    weights = factory.from_config(config).num_parameters()
                if weights > MOST_WEIGHTS:
                    raise VlexportError(f"{weights:,} weights with the sizes that its configuration takes")
                model = factory.from_config(config)
                owner = owner_of(model)
            except Exception as error:  # noqa: BLE001  configurations raise errors of their own
                problem = error
                continue
            state = classes.random_state(model)
            model.load_state_dict({**model.state_dict(), **state})
            folder.mkdir(parents=True, exist_ok=True)
            # What transformers joins and cuts while it loads is refused by recipe `generic`.
            model.save_pretrained(folder, save_original_format=model_type not in JOINED)
            if hasattr(model, "load_speakers"):
                torch.save({}, folder / "spk_dict.pt")
            classes.write_pixels(folder, owner)
            return type(model).from_pretrained(folder).eval()
    raise problem


def _fit(config: Any) -> None:
    """Fit rotary sections, tokens and sizes of tiled pictures to a tiny model."""
    for name in getattr(config, "sub_configs", {}):
        if hasattr(part := getattr(config, name, None), "to_dict"):
            _fit(part)
    rotary = getattr(config, "rope_parameters", None)
    has_sections = any(
        name in config.model_type
        for name in ("qwen", "glm", "exaone", "omni", "paddle", "hunyuan", "cosmos3_edge")
    )
    if rotary and "rope_theta" in rotary and has_sections:
        heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(heads * rotary.get("partial_rotary_factor", 1.0)) // 2
        rotary["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and set(kinds) == {"linear_attention"}:
        last = "indexed" if any("index" in name for name in vars(config)) else "full"
        config.layer_types = [*kinds[1:], f"{last}_attention"]
    if getattr(config, "kv_source_layers", None) is not None:
        config.kv_source_layers = config.kv_source_layers[: config.num_hidden_layers]
        config.head_dim = config.qk_rope_head_dim
    for name, token in MARKS.items():
        if hasattr(config, name) or "thinker" in config.model_type:
            setattr(config, name, token)
    most = getattr(getattr(config, "text_config", config), "vocab_size", None)
    for number, name in enumerate((*IMAGE, *VIDEO)):
        if most and (getattr(config, name, None) or 0) >= most:
            setattr(config, name, most - 1 - number)
    if getattr(config, "image_grid_pinpoints", None):
        side = config.vision_config.image_size
        side = side[0] if isinstance(side, list | tuple) else side
        config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]


def build(folder: Path, recipe: str | None = None, backend: str = "onnxruntime") -> Bundle:
    engines = folder / "engines"
    return vlexport.build(folder, backend, recipe=recipe, output_dir=engines, progress=lambda *_: None)


def owner_of(model: Any) -> Any:
    """Return the part of a model that has the features."""
    kind = feature_class(model.config.model_type)
    assert kind is not None
    return next(part for part in model.modules() if type(part) is kind[0])


def config_of(model: Any) -> Any:
    """Return what the generic recipe finds that a model's class takes."""
    checkpoint, place = Checkpoint.open(model.name_or_path), Path(model.name_or_path)
    return request(checkpoint, recipe="generic", backend="eager", output_dir=place / "engines").config


def pictures_of(
    owner: Any, rule: PictureRule, images: int, *, video: bool, axis: int = 0
) -> dict[str, Tensor]:
    """Return random pictures of the one shape that a bundle takes, or one as a video."""
    generator = torch.Generator().manual_seed(images + 10 * video)
    pictures = [rule.arguments(torch.randn(rule.row_width, generator=generator)) for _ in range(images)]
    # One picture beside the other, where the class takes sizes of each.
    axes = {"pixel_values": 3} if "target_sizes" in rule.sizes else dict.fromkeys(rule.sizes, axis)
    values = {name: torch.cat([each[name] for each in pictures], axes.get(name, 0)) for name in rule.sizes}
    if not video:
        return values
    if (frames := first(owner, "temporal_merge_size") or 1) > 1:
        values["pixel_values"] = values["pixel_values"].repeat(frames, 1)
        values["image_grid_thw"] = values["image_grid_thw"] * torch.tensor([frames, 1, 1])
    taken = inspect.signature(owner.get_video_features).parameters
    further = (
        {"num_frames_per_video": torch.ones(1, dtype=torch.int64)} if "num_frames_per_video" in taken else {}
    )
    names = (name for name in inspect.signature(owner.get_image_features).parameters if name in values)
    return {**dict(zip(taken, map(values.__getitem__, names), strict=False)), **further}


def pixels_of(owner: Any, images: int, *, video: bool = False, config: Any = None) -> dict[str, Tensor]:
    """Return random pixels of images of other sizes, or of a video, as the class takes them.

    config  what the recipe finds, of classes that take pictures of one shape, or patches line by line
    """
    if isinstance(rule := getattr(config, "rule", None), PictureRule):
        # Prompts have an axis of pictures.
        nested = rule.sizes["pixel_values"][1:2] if len(rule.sizes["pixel_values"]) == 5 else ()
        return pictures_of(owner, rule, images, video=video, axis=len(nested))
    generator = torch.Generator().manual_seed(images + 10 * video)
    taken = inspect.signature(owner.get_image_features).parameters
    patch: Any
    side: Any
    patch, side = one(first(owner, "patch_size")), one(first(owner, "image_size"))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if "image_grid_thw" in taken:
        merge, temporal = first(owner, "spatial_merge_size"), first(owner, "temporal_patch_size") or 1
        merge = merge or first(owner, "merge_size") or 1
        grids = [(2 if video else 1, merge * (2 + number), merge * 3) for number in range(images)]
        rows = noise(sum(t * h * w for t, h, w in grids), 3 * temporal * patch**2)
        if getattr(config, "form", None) == RASTER:
            rows = rows.unflatten(1, (3, patch, patch))
        kind = "video" if video else "image"
        merges = {f"{kind}_merge_sizes": torch.full((images,), merge)} if MERGES in taken else {}
        return {
            "pixel_values_videos" if video else "pixel_values": rows,
            f"{kind}_grid_thw": torch.tensor(grids),
            **merges,
        }
    if "image_sizes" in taken and first(owner, "patch_positional_embedding") is not None:
        cell = patch * (getattr(owner.config, "spatial_merge_size", 1))
        sizes = torch.tensor([(cell * (2 + number), cell * 3) for number in range(images)])
        return {"pixel_values": noise(images, 3, *sizes.amax(0).tolist()), "image_sizes": sizes}
    if "spatial_shapes" in taken:
        shapes = torch.tensor([(2 + number, 3) for number in range(images)])
        rows = noise(images, 3 * images + 3, 3 * patch**2)
        mask = torch.arange(rows.shape[1]) < shapes.prod(1, keepdim=True)
        return {"pixel_values": rows, "pixel_attention_mask": mask, "spatial_shapes": shapes}
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
        rows, _ = rows_and_levels(method(**{key: value for key, value in pixels.items() if key in taken}))
    counts = [part.numel() // part.shape[-1] for part in rows for _ in range(frames)]
    token = _token(model.config, names)
    first, last, *ends = MARKS.values()
    parts = [[11, 12, first, *[token] * (count // frames), last] for count in counts]
    each = len(parts) // batch
    texts = [list(chain(*parts[start : start + each])) for start in range(0, len(parts), each)]
    if video:
        texts = [[ends[0], *text, ends[1]] for text in texts]
    ids = torch.tensor(texts)
    marks = (ids == token).long()
    taken = inspect.signature(owner.forward).parameters
    further = {"mm_token_type_ids": marks * (2 if video else 1), "token_type_ids": marks}
    if video:
        further["video_second_per_grid"] = torch.ones(len(counts) // frames)
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
    config = config_of(model)
    is_picture = isinstance(config.rule, PictureRule)
    yield "one image", prompts(model, pixels_of(owner, 1, config=config))
    yield "three images", prompts(model, pixels_of(owner, 3, config=config))
    two = pixels_of(owner, 2, config=config)
    if is_picture and two["pixel_values"].ndim == 5:
        two = {name: torch.cat(value.chunk(2, 1)) for name, value in two.items()}
    elif is_picture:
        pass
    elif "image_grid_thw" in two:
        two["image_grid_thw"][1] = two["image_grid_thw"][0]
        two["pixel_values"] = two["pixel_values"][: 2 * int(two["image_grid_thw"][0].prod())]
    elif "image_sizes" in two:
        two["image_sizes"][1] = two["image_sizes"][0]
    elif two["pixel_values"].ndim == 5:
        two["pixel_values"] = two["pixel_values"].transpose(0, 1)
    yield "two prompts", prompts(model, two, batch=2)
    if hasattr(owner, "get_video_features"):
        yield "video", _video(model, pixels_of(owner, 1, video=True, config=config))


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
    """Return the logits of a call, and tokens of a greedy answer or, of masked words, the likeliest."""
    writer = getattr(model, "thinker", model)
    starts = {"decoder_input_ids": call["input_ids"][:, :1]} if writer.config.is_encoder_decoder else {}
    # Some begin with random tokens.
    torch.manual_seed(0)
    with torch.inference_mode():
        logits = writer(**call, **starts).logits
        if not hasattr(writer, "generate"):
            return logits, logits.argmax(-1)
        tokens = writer.generate(**call, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return logits, getattr(tokens, "sequences", tokens)


def features(model: Any, call: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the rows of images, and the structure that they are in."""
    with torch.inference_mode():
        output = model.get_image_features(**call)
    rows = output.get("fpn_hidden_states", rows_and_levels(output)[0])
    shapes = [part.shape for part in (*rows, *output.get("fpn_position_encoding", ()))]
    values = torch.cat([value.flatten() for value in outputs_of(output).values()])
    return values, (type(output), type(rows), shapes)


def attached(model_type: str, folder: Path, recipe: str | None = None) -> str:
    """Return `equal`, of what, and what differs, of a model with its engine attached."""
    model = whole_model(model_type, folder)
    bundle = build(folder, recipe or (None if model_type in served_types() else "generic"))
    owner, ask, outcome, head = owner_of(model), answers, "equal", None
    if model is owner and not hasattr(model, "generate"):
        ask, outcome = features, "features equal"
        head = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
        config = config_of(model)
        calls = {f"{count} images": pixels_of(owner, count, config=config) for count in (1, 3)}
    else:
        calls = dict(calls_of(model))
    own = {name: ask(model, call) for name, call in calls.items()}
    problems = []
    # Weights that are kept compute videos that no engine has.
    for keeps in (False, True)[: 1 + (model_type in VIDEOS_APART)]:
        with attach(model, bundle, keep_weights=keeps) as engine:
            for name, call in calls.items():
                before = engine.session.num_calls
                try:
                    rows, answer = ask(model, call)
                except UnsupportedError as error:
                    if keeps or name != "video" or "keep_weights=True" not in str(error):
                        raise
                    why = VIDEOS_APART[model_type]
                    outcome = f"equal; videos by the class's own parts, with keep_weights=True: {why}"
                    continue
                difference = float((rows - own[name][0]).norm() / own[name][0].norm())
                runs, is_apart = engine.session.num_calls - before, keeps and name == "video"
                if runs > 0 if is_apart else runs < 1 + hasattr(model, "generate"):
                    problems.append(f"{name}: the engine was {'' if is_apart else 'not '}called")
                outcome = SAMPLED.get(model_type, outcome)
                if difference > NEAR or (model_type not in SAMPLED and str(answer) != str(own[name][1])):
                    kind = "logits" if ask is answers else "rows"
                    problems.append(f"{name}: {kind} differ by {difference:.1e}")
    if head is not None:
        outcome += f"; {head}, which writes text, calls its tower itself"
    return "; ".join(problems) or outcome


def wide(folder: Path) -> None:
    """Write a checkpoint with eight blocks of a 3B model's vision tower, and a small language model."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    blocks = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16}
    vision = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14, **blocks}
    text = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 8192}
    config = LlavaConfig(
        vision_config={**vision, "num_hidden_layers": 8, "vision_use_head": False},
        text_config={"model_type": "llama", **text, "num_key_value_heads": 4, "num_hidden_layers": 2},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config)
    model.load_state_dict({**model.state_dict(), **classes.random_state(model)})
    model.save_pretrained(folder)
    classes.write_pixels(folder, model.model)


def held(folder: Path, bundle: Path) -> dict[str, int]:
    """Return what an engine and the rest of a model hold; what libraries take once is there before."""
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    attach(model, bundle).detach()
    del model
    give_back()
    start = resident()
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    weights = [weakref.ref(each) for each in model.model.parameters()]
    engine = attach(model, bundle)
    left = {id(each) for each in model.parameters() if each.numel()}
    old = [each for ref in weights if (each := ref()) is not None and id(each) not in left]
    return {
        "held in no file": resident() - start,
        "weights of the language model": sum(each.nbytes for each in model.parameters()),
        "weights freed": engine.freed_bytes,
        "files of the bundle": sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()),
        "old weights alive": len(old),
    }


def memory() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as place:
        wide(Path(place))
        bundle = build(Path(place), "generic")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(held, Path(place), Path(bundle.path)).result()


def main(names: list[str]) -> None:
    """Try the classes that export, all without names; write what came of each beside how it exports."""
    if names == ["--memory"]:
        sys.stdout.writelines(f"{name}: {count:,}\n" for name, count in memory().items())
        return
    stored = json.loads(classes.RESULTS.read_text(encoding="utf-8"))
    by_type = {each["model_type"]: each for each in stored["classes"]}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [name for name, each in by_type.items() if each["exports"]]:
            try:
                with classes.limited(classes.SECONDS):
                    outcome = attached(name, Path(folder) / name)
            except Exception as problem:  # noqa: BLE001  classes raise errors of their own
                outcome = classes.reason(problem, Path(folder))
            by_type[name]["attach"] = outcome
            sys.stdout.write(f"{name}: {outcome}\n")
            sys.stdout.flush()
            write_whole(classes.RESULTS, json.dumps(stored, indent=1) + "\n")
    classes.write_page(stored["classes"])


if __name__ == "__main__":
    main(sys.argv[1:])
