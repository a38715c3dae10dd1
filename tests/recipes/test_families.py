"""Questions that every family answers: rows of any mix, refused settings, builds, answers of its class."""

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vlexport.recipes.demo import kimi_vl, nemotron_vl, qwen2_vl, qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from tests.backends.towers import NATIVE
from tests.cli.lines import vlexport
from tests.golden_data import FOLDER
from tests.mutation.trials import TRIALS
from tests.reference.test_decoders import text_model_of
from tests.slice_mixes import relative_l2
from tests.tiny_qwen2_5_vl import flat
from vlexport.backends import capability_of, find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import CheckpointError, InputError, LimitError
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.testing import check_recipe
from vlexport.vision.attention.layout import LAYOUTS

build = importlib.import_module("vlexport._build.build")
CLASS = "transformers.models.nemotron_h_omni"
NEMOTRON = pytest.mark.skipif(
    importlib.util.find_spec(CLASS) is None, reason="transformers has no nemotron_h_omni"
)
TILES = TRIALS["nemotron_vl"]["tiles"]
# Checkpoints by name: recorded ones, and contents of tiny ones.
CHECKPOINTS: dict[str, Any] = {
    "qwen2_vl": FOLDER / "e2e_qwen2_vl" / "checkpoint",
    "qwen3_vl": FOLDER / "e2e_qwen3_vl" / "checkpoint",
    "kimi_vl": kimi_vl.contents(kimi_vl.Tiny(depth=2, with_decoder=False)),
    "nemotron_vl": nemotron_vl.contents(nemotron_vl.Tiny(depth=2)),
    "nemotron_vl tiles": nemotron_vl.contents(TILES),
}
# None of these is among the mixes that graphs are traced with; frames differ in length and kind.
MIX = [("video", (2, 2, 6)), ("image", (1, 10, 4)), ("image", (1, 2, 2)), ("video", (1, 4, 4))]
MIXES = {"nemotron_vl": [MIX], "nemotron_vl tiles": [[("image", (7, 4, 4)), *MIX, ("image", (3, 4, 4))]]}


def case(name: str, *values: Any, marks: Any = ()) -> Any:
    """Return a row of a table, skipped where transformers lacks the family's class."""
    marks = [*(marks if isinstance(marks, list | tuple) else [marks]), *[NEMOTRON] * ("nemotron" in name)]
    return pytest.param(name, *values, marks=marks)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Callable[[str], Checkpoint]:
    """Checkpoints by name, each written once."""
    written: dict[str, Checkpoint] = {}

    def named(name: str) -> Checkpoint:
        if name not in written:
            stored = CHECKPOINTS[name]
            if "qwen" not in name:
                stored = write_checkpoint(tmp_path_factory.mktemp("family") / "tiny", stored, seed=0)
            written[name] = Checkpoint.open(stored)
        return written[name]

    return named


@pytest.mark.parametrize("name", list(map(case, CHECKPOINTS)))
def test_a_config_survives_its_json(checkpoints, name):
    recipe = recipe_for(checkpoints(name))
    config = recipe.read_config(checkpoints(name))
    assert recipe.parse_config(json.loads(json.dumps(encode(config)))) == config


@pytest.mark.seconds
@pytest.mark.parametrize("name", list(map(case, CHECKPOINTS)))
def test_items_together_and_apart_have_the_rows_of_the_reference_in_every_layout(checkpoints, name):
    checkpoint = checkpoints(name)
    recipe = recipe_for(checkpoint)
    config, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    reference, limit = recipe.reference(checkpoint), recipe.limits["float32"].relative_l2
    sets = recipe.shape_sets(config)
    # Recorded towers of Qwen are compared in test_recorded_requests.py.
    mixes = [sets["films"]] if "qwen" in name else MIXES.get(name, list(sets.values()))
    for mix in mixes:
        items = random_items(recipe, config, mix, seed=0)
        wanted = reference.run(items)
        for layout in LAYOUTS:
            with torch.inference_mode():
                together = tower(recipe.prepare(config, items, layout))
                apart = [tower(recipe.prepare(config, [item], layout)) for item in items]
            for output, rows in wanted.items():
                assert relative_l2(together[output], rows) < limit, (mix, layout)
                # Sums over other batch sizes.
                alone = torch.cat([each[output] for each in apart])
                torch.testing.assert_close(alone, together[output], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        nemotron_vl.Tiny(depth=2),
        nemotron_vl.Tiny(depth=1, final_norm=True, scaled=True, temporal=3),
        TILES,
    ],
)
@NEMOTRON
def test_the_recipe_conforms(tmp_path, sizes):
    folder = write_checkpoint(tmp_path / "tiny", nemotron_vl.contents(sizes), seed=0)
    report = check_recipe("nemotron_vl", folder)
    assert report.passed, report.table()


CONFIG, SETTINGS = "config.json", "preprocessor_config.json"
BLOCKS = "ascending numbers of the 4 blocks"
# Checkpoint, file, setting with its section, a value that no release has, and the message.
REFUSED = [
    ("qwen3_vl", CONFIG, "vision_config.deepstack_visual_indexes", [2, 1], BLOCKS),
    ("qwen3_vl", CONFIG, "vision_config.deepstack_visual_indexes", [1, 4], BLOCKS),
    ("qwen3_vl", CONFIG, "vision_config.num_position_embeddings", 60, "a square number"),
    ("qwen3_vl", CONFIG, "vision_config.hidden_act", "silu", "gelu_pytorch_tanh"),
    ("kimi_vl", CONFIG, "vision_config.merge_kernel_size", [2, 4], "merge_kernel_size' is"),
    ("kimi_vl", SETTINGS, "pad_input", False, "pad_input' is"),
    ("kimi_vl", SETTINGS, "patch_size", 16, "patch_size' is"),
    ("nemotron_vl", CONFIG, "vision_config.use_swiglu_ffn", True, "ffn'"),
    ("nemotron_vl", CONFIG, "vision_config.hidden_act", "relu", "act'"),
    ("nemotron_vl", CONFIG, "vision_config.num_attention_heads", 5, "size'"),
    ("nemotron_vl", CONFIG, "vision_config.layerscale_value", 0.5, "value'"),
    ("nemotron_vl", CONFIG, "vision_config.video_temporal_patch_size", None, "size'"),
    ("nemotron_vl", SETTINGS, "patch_size", 14, "size'"),
    ("nemotron_vl tiles", CONFIG, "ps_version", "v1", "expected"),
    ("nemotron_vl tiles", CONFIG, "ps_version", None, "expected"),
    ("nemotron_vl tiles", CONFIG, "force_image_size", None, "expected"),
    ("nemotron_vl tiles", CONFIG, "force_image_size", 80, "expected"),
    ("nemotron_vl tiles", CONFIG, "vision_config.args.model", "vit_large_patch16_224", "expected"),
    ("nemotron_vl tiles", CONFIG, "vision_config.args.min_num_patches", 1024, "expected"),
    ("nemotron_vl tiles", CONFIG, "vision_config.video_temporal_patch_size", 2, "expected"),
    ("nemotron_vl tiles", CONFIG, "vision_config.vitdet_window_size", 16, "expected"),
    ("nemotron_vl tiles", SETTINGS, "image_size", 32, "expected"),
    ("nemotron_vl tiles", SETTINGS, "use_thumbnail", False, "expected"),
    ("nemotron_vl tiles", SETTINGS, "norm_mean", None, "expected"),
]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "file", "setting", "value", "message"), [case(*refused) for refused in REFUSED]
)
def test_a_setting_that_no_release_has_is_refused(checkpoints, tmp_path, name, file, setting, value, message):
    checkpoint = checkpoints(name)
    recipe_for(checkpoint).read_config(checkpoint)
    for path in checkpoint.path.iterdir():
        if path.name != file:
            shutil.copy(path, tmp_path)
    stored = json.loads((checkpoint.path / file).read_text())
    *sections, key = setting.split(".")
    section = stored
    for each in sections:
        section = section[each]
    section[key] = value
    (tmp_path / file).write_text(json.dumps(stored))
    changed = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        recipe_for(checkpoint).read_config(changed)
    assert name != "qwen3_vl" or key in str(raised.value)


def blank(kind: Any, *size: int) -> Pixels:
    return Pixels(kind=kind, frames=torch.zeros(*size, 3).to(torch.uint8))


@pytest.mark.parametrize(
    ("name", "pixels", "error", "message"),
    [
        case("kimi_vl", blank("video", 2, 28, 28), InputError, "takes images only"),
        case("kimi_vl", blank("image", 1, 13, 512 * 14), LimitError, "fewer than 512 patches"),
        case("nemotron_vl", blank("image", 2, 32, 32), InputError, "one frame, 2 given"),
        case("nemotron_vl", blank("image", 1, 1, 201), LimitError, "expected"),
        case("nemotron_vl", blank("video", 1, 4096, 2), LimitError, "expected"),
    ],
)
def test_media_that_no_call_holds_are_refused(checkpoints, name, pixels, error, message):
    recipe = recipe_for(checkpoints(name))
    with pytest.raises(error, match=message):
        recipe.preprocess(recipe.read_config(checkpoints(name)), pixels)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "grid", "message"),
    [
        case("kimi_vl", "video", (8, 588), (2, 2, 2), r"item 0: a video given\. This family takes images"),
        case("nemotron_vl", "image", (4, 768), (1, 2, 2), "patches of shape"),
    ],
)
def test_items_that_no_call_holds_are_refused(checkpoints, name, kind, shape, grid, message):
    recipe = recipe_for(checkpoints(name))
    item = MediaItem(kind=kind, patches=torch.zeros(shape), grid=grid)
    with pytest.raises(InputError, match=message):
        recipe.prepare(recipe.read_config(checkpoints(name)), [item], "grouped")


KIMI, NANO = kimi_vl.Tiny(depth=1), nemotron_vl.Tiny(depth=1)
FULL = pytest.mark.full
BUNDLES = [
    case("kimi_vl", KIMI, "onnxruntime", "float32"),
    *[case("kimi_vl", KIMI, each, "float32", marks=FULL) for each in ("eager", "openvino", "inductor")],
    *[case("kimi_vl", KIMI, each, "bfloat16", marks=FULL) for each in ("eager", "inductor")],
    case("kimi_vl", KIMI, "openvino", "bfloat16", marks=NATIVE),
    case("nemotron_vl", NANO, "onnxruntime", "float32"),
    *[case("nemotron_vl", NANO, each, "float32", marks=FULL) for each in ("openvino", "inductor")],
    case("nemotron_vl", NANO, "eager", "bfloat16", marks=FULL),
    case("nemotron_vl", TILES, "onnxruntime", "float32", marks=FULL),
    case("nemotron_vl", TILES, "openvino", "float32"),
    case("nemotron_vl", TILES, "eager", "bfloat16", marks=FULL),
    case("nemotron_vl", TILES, "openvino", "bfloat16", marks=NATIVE),
]
# Of images: height and width. Videos of Nemotron have two of these.
SIDES = [(61, 120), (300, 45), (28, 28)]


def noise(kind: Any, frames: int, source: torch.Generator) -> list[Pixels]:
    return [
        Pixels(
            kind=kind,
            frames=torch.randint(256, (frames, *sides, 3), dtype=torch.uint8, generator=source),
            frames_per_second=4.0 if kind == "video" else None,
        )
        for sides in SIDES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "backend", "dtype"), BUNDLES)
def test_bundles_encode_prune_and_answer_what_they_were_not_traced_with_like_the_class(
    tmp_path, name, sizes, backend, dtype
):
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    contents = {"kimi_vl": kimi_vl, "nemotron_vl": nemotron_vl}[name].contents
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny", contents(sizes), seed=0))
    spec = build.request(checkpoint, backend=backend, dtype=dtype, output_dir=tmp_path / "engines")
    bundle = build.build_checkpoint(spec).require_passed()
    source = torch.Generator().manual_seed(0)
    images = noise("image", 1, source)
    videos = noise("video", 5, source) if name == "nemotron_vl" else []
    given: Any = {"images": images, "videos": videos}
    recipe, pipeline = spec.recipe, load(bundle.path, checkpoint=checkpoint)
    items = [recipe.preprocess(recipe.read_config(checkpoint), each) for each in (*images, *videos)]
    wanted = recipe.reference(checkpoint).run(items)["embeds"]
    rate = 0.6 if videos else None
    whole, left = pipeline.encode(**given), pipeline.encode(**given, prune=rate)
    rows = torch.cat([item.embeds.float() for item in whole])
    assert relative_l2(rows, wanted) < recipe.limits[dtype].relative_l2
    for before, after in zip(whole, left, strict=True):
        kept = torch.arange(len(before.embeds)) if after.kept is None else after.kept
        assert (len(kept) < len(before.embeds)) == (before.kind == "video")
        assert torch.equal(after.embeds, before.embeds[kept])
    if dtype != "float32":
        return
    request = Request(prompt="Which?", **given, prune=rate, generation=Generation(max_new_tokens=16))
    chunks = replace(request, generation=Generation(max_new_tokens=16, prefill_chunk=37))
    answer, other = pipeline.generate(request), pipeline.generate(chunks)
    if name == "kimi_vl":
        model, slot = text_model_of(checkpoint, tmp_path / "class"), kimi_vl.token("<|media_pad|>")
    else:
        # Weights depend on seed and name: this has the decoder of tiles too, whose own class is remote code.
        known = write_checkpoint(tmp_path / "known", contents(NANO), seed=0)
        classes = importlib.import_module(f"{CLASS}.modeling_nemotron_h_omni")
        model = classes.NemotronH_Omni_Reasoning_V3.from_pretrained(known).eval().language_model
        slot = nemotron_vl.token("<image>")
    ids = torch.tensor([answer.prompt_token_ids])
    embeds = model.get_input_embeddings()(ids)
    visual = torch.cat([item.embeds for item in left]) if videos else wanted
    assert int((ids == slot).sum()) == len(visual)
    embeds[ids == slot] = visual
    # Nemotron's class generates from ids alone, so steps are taken here, each over all tokens.
    theirs = list[int]()
    with torch.inference_mode():
        for _ in answer.token_ids:
            logits = model(inputs_embeds=embeds, use_cache=False).logits
            theirs.append(int(logits[0, -1].argmax()))
            last = model.get_input_embeddings()(torch.tensor([theirs[-1:]]))
            embeds = torch.cat([embeds, last], dim=1)
    assert list(answer.token_ids) == theirs
    assert other.token_ids == answer.token_ids


TINY = {
    "qwen2_vl flat": flat(qwen2_vl.contents(qwen2_vl.Tiny(depth=1, naming="visual.", with_decoder=False))),
    "qwen2_vl": qwen2_vl.contents(qwen2_vl.Tiny(depth=1, naming="model.visual.", with_decoder=False)),
    "qwen3_vl": qwen3_vl.contents(qwen3_vl.Tiny(depth=2, levels=(0,), with_decoder=False)),
    "kimi_vl": kimi_vl.contents(replace(KIMI, with_decoder=False)),
    "nemotron_vl": nemotron_vl.contents(replace(NANO, with_decoder=False)),
    "nemotron_vl tiles": nemotron_vl.contents(replace(TILES, with_decoder=False)),
}
EVERY_PRECISION = {
    "eager bfloat16": [],
    "onnxruntime int8": [],
    "openvino int8": [],
    "openvino bfloat16": [NATIVE],
    "inductor bfloat16": [FULL],
}
RTX = ("tensorrt_rtx float32", "tensorrt_rtx bfloat16", "tensorrt_rtx float16")
BUILDS = [
    *[case("qwen2_vl flat", each, marks=marks) for each, marks in EVERY_PRECISION.items()],
    *[case("qwen2_vl flat", each, marks=FULL) for each in RTX[:2]],
    case("qwen2_vl flat", RTX[2]),
    *[case("qwen2_vl", each, marks=[*marks, FULL]) for each, marks in EVERY_PRECISION.items()],
    *[case("qwen2_vl", each, marks=FULL) for each in RTX],
    *[case("qwen3_vl", f"eager {each}", marks=FULL) for each in ("bfloat16", "uint8")],
    case("qwen3_vl", "onnxruntime float32", marks=FULL),
    case("qwen3_vl", "onnxruntime int8"),
    # Qwen2-VL's are in the slow part.
    *[case("qwen3_vl", f"openvino {each}", marks=FULL) for each in ("float32", "int8")],
    case("qwen3_vl", "openvino bfloat16", marks=[NATIVE, FULL]),
    *[case("qwen3_vl", f"inductor {each}", marks=FULL) for each in ("float32", "bfloat16")],
    case("qwen3_vl", RTX[0]),
    *[case("qwen3_vl", each, marks=FULL) for each in RTX[1:]],
    *[case("kimi_vl", f"onnxruntime {each}") for each in ("int8", "uint8")],
    *[case("kimi_vl", each, marks=FULL) for each in RTX[:2]],
    case("nemotron_vl", "onnxruntime int8"),
    *[case(name, RTX[0], marks=FULL) for name in ("nemotron_vl", "nemotron_vl tiles")],
]
OPTION = {"int8": "--quantize", "uint8": "--input-dtype"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), BUILDS)
def test_the_demo_checkpoint_builds_in_every_precision(tmp_path, name, way):
    backend, precision = way.split()
    library, quantize = find_backend(backend), "int8" if precision == "int8" else None
    able = capability_of(library, "float32" if precision in OPTION else precision, quantize)
    assert able is not None
    if lacking := library.missing() or library.cannot_compute(able.precision):
        pytest.skip(lacking)
    words = [OPTION.get(precision, "--dtype"), precision]
    if backend == "tensorrt_rtx":
        words += ["--targets", "sm89", "--profile", "thumbnail"]
    checkpoint = write_checkpoint(tmp_path / "tiny", TINY[name], seed=0)
    ran = vlexport("build", checkpoint, "--backend", backend, *words, "--output-dir", tmp_path / "engines")
    assert ran.code == 0, ran.err
    assert f", {'not_run' if backend == 'tensorrt_rtx' else 'passed'}\n" in ran.err
