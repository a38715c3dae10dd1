"""Every class of transformers with image features, on a tiny random checkpoint: which export, what fails.

`python -m benchmarks.classes` tries all of them on ONNX Runtime, and writes docs/generic.md and the file that
`vlexport list --all` reads; with model types, those alone are tried again.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tables import markdown, marks, write_between, write_whole
from vlexport.errors import ParityError, RequestError, VlexportError
from vlexport.recipe import served_types

# Patches along the side of an image; layers.
ACROSS = 4
DEPTH = 3
# Sizes of all parts of a configuration, by the names that configurations of transformers have.
SIZES: Mapping[str, object] = {
    **dict.fromkeys(
        ("num_hidden_layers", "depth", "num_layers", "n_layers", "encoder_layers", "layers"), DEPTH
    ),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "out_hidden_size", "text_hidden_size"), 64),
    **dict.fromkeys(("projection_dim", "hidden_dim", "projector_hidden_size", "visual_embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "ffn_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 4),
    "encoder_hidden_size": 64,
    "head_dim": 16,
    "fpn_hidden_size": 64,
    "num_position_embeddings": 64,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "mm_tokens_per_image": 4,
    "num_patches": ACROSS**2,
    "vision_feature_layer": -2,
}
# Of what some configurations leave open, and their classes need.
UNSET: Mapping[str, object] = {
    "head_dim": 16, "num_experts": 4, "mlp_layer_types": ["dense"] * DEPTH,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Of single model types, whose settings lack them or have sizes that depend on each other.
OF_TYPES: Mapping[str, Mapping[str, object]] = {
    "aria": {"projector_patch_to_query_dict": {ACROSS**2: 4}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _ROPE}},
    **{
        name: {"vision_config.sam_config.downsample_channels": [64, 64]}
        for name in ("deepseek_ocr2", "unlimited_ocr")
    },
    "diffusion_gemma": {
        **dict.fromkeys(("text_config.num_experts", "text_config.top_k_experts"), 2),
        "text_config.moe_intermediate_size": 64,
        "canvas_length": 8,
        "text_config.vocab_size": 256,
    },
    "dots3_note": {
        **dict.fromkeys(("vision_config.adapter_in_dim", "vision_config.adapter_out_dim"), 64),
        **dict.fromkeys(("audio_config.adapter_input_size", "audio_config.adapter_out_dim"), 64),
    },
    "embedding_gemma2": {
        "vision_config": {
            **{name: size for name, size in SIZES.items() if isinstance(size, int)},
            "model_type": "gemma4_vision",
        }
    },
    "ernie4_5_vl_moe": {
        "text_config.moe_num_experts": 4,
        "text_config.moe_k": 2,
        "text_config.moe_intermediate_size": [64, 64],
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "granite4_vision": {"deepstack_layer_map": [[-2, 0], [-1, 1]], "downsample_rate": "1/2"},
    "llama4": {
        **dict.fromkeys(("vision_config.intermediate_size", "vision_config.projector_input_dim"), 256),
        **dict.fromkeys(("vision_config.projector_output_dim", "vision_config.vision_output_dim"), 256),
    },
    **{
        name: {"image_token_id": 17, "video_token_id": 18, "insert_layer_id": 1}
        for name in ("minicpmv4_6", "minicpmv4_7")
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {
        **dict.fromkeys(("text_config.moe_hidden_size", "text_config.moe_intermediate_size"), 64),
        "audio_config.num_hidden_layers": 4,
        "text_config.num_local_experts": 4,
        "text_config.num_experts_per_tok": 2,
        "out_hidden_size": 256,
    },
    **{
        name: {
            "vision_config.backbone_config.hidden_size": 96,
            "vision_config.backbone_config.image_size": [128, 128],
            **({"image_size": 128} if "video" in name else {}),
        }
        for name in ("edgetam_video", "sam2", "sam2_video")
    },
    "qwen3_omni_moe": {"enable_audio_output": False},
    "sam3_tracker_video": {"image_size": 336},
    "step3p7": {"text_config.sliding_window": 64},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
}


# Of the parts that are not dropped.
MOST_WEIGHTS = 100_000_000
# Parts that are made tiny, by their names, and which of their layers: all, where the last may be of another
# kind; all but language models, some of which take no other sizes; vision alone.
REACHES: Sequence[tuple[Callable[[str], bool], slice]] = (
    (lambda _: True, slice(DEPTH)),
    (lambda _: True, slice(-DEPTH, None)),
    (lambda name: "text" not in name, slice(DEPTH)),
    (lambda name: "vi" in name, slice(DEPTH)),
)


def shrunk(config: Any, wanted: Callable[[str], bool], layers: slice, own: str = "") -> Any:
    """Make a configuration and its parts tiny, in place, where their names are wanted."""
    for name, kind in getattr(config, "sub_configs", {}).items():
        if _value(config, name) is None and "vi" in name and hasattr(kind, "model_type"):
            # Of a model that may have no vision.
            _set(config, name, kind())
        if hasattr(part := getattr(config, name, None), "to_dict"):
            shrunk(part, wanted, layers, name)
    if not wanted(own):
        return config
    _set(config, "per_layer_config", None)
    for name, size in SIZES.items():
        given = _value(config, name)
        if isinstance(given, list | tuple) and name == "vision_feature_layer":
            _set(config, name, [each % DEPTH for each in range(len(given))])
        elif type(given) is int or (isinstance(size, list) and given is not None):
            _set(config, name, size)
    for name, size in UNSET.items():
        if _value(config, name) is None and name in getattr(config, "__dataclass_fields__", {}):
            _set(config, name, size)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(given := _value(config, name), list):
            _set(config, name, given[layers])
    if isinstance(stages := _value(config, "stage_names"), list) and len(stages) > DEPTH + 1:
        config.stage_names = stages[: DEPTH + 1]
        config.out_features = stages[DEPTH : DEPTH + 1]
    patch, image = _value(config, "patch_size"), _value(config, "image_size")
    if patch and image:
        side = ACROSS * (patch[0] if isinstance(patch, list | tuple) else patch)
        _set(config, "image_size", [side, side] if isinstance(image, list | tuple) else side)
    return config


def tiny_config(model_type: str, wanted: Callable[[str], bool], layers: slice) -> Any:
    from transformers import AutoConfig

    config = shrunk(AutoConfig.for_model(model_type), wanted, layers)
    for place, value in OF_TYPES.get(model_type, {}).items():
        *parts, name = place.split(".")
        part = AutoConfig.for_model(**value) if isinstance(value, dict) and "model_type" in value else value
        setattr(reduce(getattr, parts, config), name, part)
    return config


def _set(config: Any, name: str, value: object) -> None:
    with suppress(Exception):
        setattr(config, name, value)


def _value(config: Any, name: str) -> Any:
    """Return a setting; None where it is missing or differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  configurations raise errors of their own
        return None


def random_state(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights by their fan-in; queries and keys twice as much, norms round 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, each in model.state_dict().items():
        fan_in = math.prod(each.shape[1:]) if each.ndim > 1 else 100
        mean = 1.0 if each.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0
        gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", ".q.", ".k.")) else 1.0
        values = mean + torch.randn(each.shape, generator=generator) * gain / math.sqrt(fan_in)
        found[name] = values.abs() if name.endswith("running_var") else values
    return found


PIXELS = {
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.25], "resample": 3, "do_normalize": True,
}  # fmt: skip


# Arguments that the recipe gives a class itself, and those of a class that it takes from a processor.
PLAIN = ("pixel_values", "image_sizes", "kwargs")
OWN = ("image_position_ids",)


def tiny(model_type: str) -> tuple[dict[str, Any], Any]:
    """Return settings and class of a tiny model; some language models keep their sizes."""
    from vlexport.vision.features.classes import vision_model

    for wanted, layers in REACHES:
        try:
            config = tiny_config(model_type, wanted, layers)
            settings = json.loads(config.to_json_string(use_diff=False))
            return settings, vision_model(model_type, settings, "eager", meta=True)
        except Exception as error:  # noqa: BLE001  configurations raise errors of their own
            problem = error
    raise problem


def write_checkpoint(model_type: str, folder: Path) -> Path:
    """Write a tiny random checkpoint of a model type: config.json, processor settings, the vision tensors."""
    from safetensors.torch import save_file

    settings, model = tiny(model_type)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    for name in list(dict(model.named_children())):
        if "language" in name or name.startswith(("text_model", "audio", "lm_head", "decoder")):
            setattr(model, name, None)
    if (weights := sum(each.numel() for each in model.parameters())) > MOST_WEIGHTS:
        raise RequestError(f"{weights:,} weights with the sizes that its configuration takes")
    save_file(random_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_pixels(folder, model)
    return folder


def write_pixels(folder: Path, model: Any) -> None:
    """Write settings of an image processor that fit the model."""
    from vlexport.vision.features.pixels import Processor
    from vlexport.vision.features.tower import first, one

    taken = inspect.signature(model.get_image_features).parameters
    merge = first(model, "spatial_merge_size") or one(first(model, "merge_kernel_size")) or 1
    patch = one(first(model, "patch_size"))
    found: dict[str, object] = {**PIXELS, "image_processor_type": "SiglipImageProcessor"}
    if "image_grid_thw" in taken:
        cell = int(patch or 1) * int(merge)
        found |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": merge}
        found |= {
            "temporal_patch_size": first(model, "temporal_patch_size") or first(model, "patch_temporal") or 1
        }
        found |= {"size": {"shortest_edge": 4 * cell**2, "longest_edge": 64 * cell**2}}
    elif "spatial_shapes" in taken:
        found |= {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": ACROSS**2}
        found |= {"patch_size": patch, "resample": 2}
    elif first(model, "patch_positional_embedding") is not None:
        found |= {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 8 * int(patch or 1)},
        }
    elif any(
        (name not in PLAIN and each.default is each.empty) or name in OWN for name, each in taken.items()
    ):
        # Arguments that the class's own processor makes.
        own = Processor.of(model.config.model_type, {})
        side = one(first(model, "image_size"))
        # A class without a processor of its own takes that of its family.
        own = own if own.settings else Processor.of("gemma4", {})
        found = {"image_processor_type": own.name}
        found |= {"max_soft_tokens": 70} if "max_soft_tokens" in own.settings else {}
        found |= {"patch_size": patch} if patch and "patch_size" in own.settings else {}
        sizes = [
            name for name, value in own.settings.items() if isinstance(value, dict) and "height" in value
        ]
        found |= {name: {"height": side, "width": side} for name in sizes}
    else:
        side = one(first(model, "image_size")) or ACROSS * (patch or 1)
        found |= {"size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(found), encoding="utf-8")


# Rows of the right segments are within 1e-5.
FAR = 1e-4
# Seconds for one class; a convolution network on whole pictures takes longer in plain operators.
SECONDS = 150
# Letters of a reason.
WIDTH = 120
RESULTS = Path(__file__).parents[1] / "recipes" / "generic.json"
PAGE = Path(__file__).parents[1] / "docs" / "generic.md"


def model_types() -> list[str]:
    """Return the model types of transformers whose class has image features."""
    from transformers import CONFIG_MAPPING

    from vlexport.vision.features.classes import feature_class

    found = []
    for name in sorted(CONFIG_MAPPING):
        able = feature_class(name)
        if able is not None:
            kind = CONFIG_MAPPING[name]
            # A part of a model shares the module of its classes, but is no checkpoint of its own.
            found += [name] if able[1] in (kind, *getattr(kind, "sub_configs", {}).values()) else []
    return found


def tried(model_type: str, folder: Path) -> dict[str, object]:
    """Build, check and use a tiny bundle of a model type; return what came of it."""
    from vlexport._build.build import build_checkpoint
    from vlexport._build.request import request
    from vlexport.checkpoint import Checkpoint
    from vlexport.parity.report import ParityReport
    from vlexport.parity.samples import random_items
    from vlexport.runtime.pipeline import load
    from vlexport.vision.features.classes import feature_class

    able = feature_class(model_type)
    assert able is not None
    found: dict[str, object] = {"model_type": model_type, "class": able[0].__name__}
    step = "tiny checkpoint"
    try:
        with limited(SECONDS):
            checkpoint = Checkpoint.open(write_checkpoint(model_type, folder / model_type))
            step = "class"
            spec = request(checkpoint, recipe="generic", backend="onnxruntime", output_dir=folder / "engines")
            step = "build"
            built = build_checkpoint(spec, lambda *_: None)
            bundle, rows_of = built.bundle, ParityReport.from_json(built.bundle.verdict.table).rows
            if failed := [row for row in rows_of if row.verdict == "failed"]:
                measured = ", ".join(f"{name} {value:.3g}" for name, value in failed[0].metrics.items())
                raise ParityError(f"accuracy check, {failed[0].level} {failed[0].check}: {measured}")
            built.require_passed()
            step = "encode"
            packing = spec.packing
            # Another number of items than was traced, in another order.
            mixes = list(packing.mixes().values())
            items = random_items(spec.recipe, spec.config, [*mixes[0], *mixes[-1], *mixes[1]], seed=7)
            with load(bundle.path, allow_failed=False) as pipeline:
                calls = [[item] for item in items] if packing.is_one else [items]
                given = [each for call in calls for each in pipeline.encode_items(call)]
            wanted = spec.recipe.reference(checkpoint).run(items)["embeds"]
            rows = torch.cat([each.embeds for each in given])
            error = float((rows.double() - wanted.double()).norm() / wanted.double().norm())
            if error > FAR:
                raise ParityError(f"rows of another mix are {error:.1e} from those of the class")
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        return {**found, "exports": False, "step": step, "reason": reason(problem, folder)}
    worst = max(row.metrics.get("relative_l2", 0.0) for row in rows_of if row.level == "L1")
    taken = {"form": spec.config.form, "outputs": list(spec.config.outputs)}
    return {**found, "exports": True, **taken, "parity": worst, "encode": error}


def reason(problem: BaseException, folder: Path) -> str:
    """Return the first sentence of what began it."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    words = " ".join(str(problem).replace(f"{folder}/", "").split())
    first = textwrap.shorten(re.split(r"\. ", words)[0].rstrip("."), WIDTH, placeholder=" ...")
    own = isinstance(problem, VlexportError | TimeoutError)
    return first if own else f"{type(problem).__name__}: {first}"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in code that computes longer; a process that is held counts no time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s of a core")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main(names: Sequence[str]) -> None:
    """Try the classes, all without names, and write the results after each of them."""
    import transformers

    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if stored.get("transformers") != transformers.__version__:
        stored = {}
    classes = {each["model_type"]: each for each in stored.get("classes", [])}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or model_types():
            before = {key: value for key, value in classes.get(name, {}).items() if key == "attach"}
            classes[name] = {**tried(name, Path(folder)), **before}
            shown = {key: value for key, value in classes[name].items() if key != "class"}
            sys.stdout.write(json.dumps(shown) + "\n")
            sys.stdout.flush()
            ordered = [classes[key] for key in sorted(classes)]
            content = {"transformers": transformers.__version__, "classes": ordered}
            write_whole(RESULTS, json.dumps(content, indent=1) + "\n")
    write_page(ordered)


def write_page(classes: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables: what exports, by what it takes and gives, and what fails and why."""
    good = [each for each in classes if each["exports"]]
    bad = [each for each in classes if not each["exports"]]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in good:
        groups.setdefault((each["form"], ", ".join(each["outputs"])), []).append(each)
    works = []
    for (takes, outputs), group in groups.items():
        worst = (f"{max(each[error] for each in group):.1e}" for error in ("parity", "encode"))
        works.append((takes, outputs, ", ".join(f"`{each['model_type']}`" for each in group), *worst))
    own = ", ".join(f"`{each['model_type']}`" for each in good if each["model_type"] in served_types())
    same = ", ".join(f"`{each['model_type']}`" for each in good if each.get("attach") == "equal")
    rows = ", ".join(f"`{each['model_type']}`" for each in good if each.get("attach") == "features equal")
    apart = [
        (f"`{each['model_type']}`", str(each.get("attach", "not tried")).replace("|", "\\|"))
        for each in good
        if each.get("attach") not in ("equal", "features equal")
    ]
    fails = [(f"`{each['model_type']}`", each["step"], each["reason"].replace("|", "\\|")) for each in bad]
    lines = [
        f"{len(good)} of {len(classes)} export; {own} have a recipe of their own.",
        "",
        *markdown(("takes", "outputs", "model types", "parity, worst", "another mix, worst"), works),
        "",
        (
            "[Attached](#attach-to-a-model-in-a-variable) to a tiny random model, one image, three, two "
            "prompts and a video where the class has one, of a `picture` all in its one shape, give the "
            f"tokens of its own tower for {same}; "
            f"features are equal, with their structure, for those that write no text: {rows}."
        ),
        "",
        *markdown(("model type", "attached"), apart),
        "",
        *markdown(("model type", "fails at", "reason"), fails),
    ]
    write_between(PAGE, *marks("classes", "python -m benchmarks.classes"), "\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
