"""One selection in three forms: eager, as an AOTInductor package, as ONNX in ONNX Runtime."""

import random

import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tests.golden_data import cases
from tests.pruning.masks import EVS_SNAP, retention_mask
from vlexport._build.token_graphs import open_graphs, planned_graphs, write_graphs
from vlexport.backends import Folder
from vlexport.errors import UnsupportedError
from vlexport.onnx.portable import selection_model
from vlexport.pruning.evs import EVS, prune
from vlexport.pruning.selectors import Selection
from vlexport.pruning.vidcom2 import VidCom2Selector

EXACT, SNAP, VIDCOM2 = EVS.selector, EVS_SNAP.selector, VidCom2Selector()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16
# How near the cut a token's dissimilarity may come through the order of a sum (float32) or one rounding of
# the dtype more or less. The cut is clean when no dropped token is that near, or all of them share one value.
BAND = {"float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
QUICK = [
    pytest.param("aoti", "float32", marks=pytest.mark.slow),
    ("onnx", "float32"),
    *(pytest.param("onnx", dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16")),
    *(pytest.param("aoti", dtype, marks=pytest.mark.full) for dtype in ("bfloat16", "float16")),
]
NUM_SHAPES, NUM_CASES = 60, 1000


def write_onnx(selector, path, dtype):
    ir.save(selection_model(selector, dtype), path)
    return path


def onnx_selection(selector, path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def run(embeds, share):
        binding = session.io_binding()
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        if embeds.dtype == torch.bfloat16:
            bits = embeds.contiguous().view(torch.int16).numpy()
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ONNX_BFLOAT16)
        else:
            value = make(embeds.contiguous().numpy())
        binding.bind_ortvalue_input("embeds", value)
        binding.bind_ortvalue_input("share", make(share.numpy()))
        binding.bind_output("rows")
        binding.bind_output("kept")
        session.run_with_iobinding(binding)
        rows, kept = binding.get_outputs()
        rows = torch.utils.dlpack.from_dlpack(rows._ortvalue.to_dlpack()).clone()
        return rows, torch.from_numpy(kept.numpy())

    return Selection(selector=selector, run=run)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A selection in a form, made once."""
    made = {}

    def make(selector, form, dtype):
        path = tmp_path_factory.mktemp(form) / f"{selector.name}-{dtype}"
        if form == "aoti":
            path.mkdir()
            identity = write_graphs(planned_graphs(selector.name, "cpu"), path, dtype)
            return open_graphs(identity, Folder(path), dtype).selection
        return onnx_selection(selector, write_onnx(selector, path.with_suffix(".onnx"), dtype))

    def once(selector, form, dtype):
        key = (selector.name, form, dtype)
        if key not in made:
            made[key] = make(selector, form, dtype)
        return made[key]

    return once


def is_clean(case):
    """Whether every way of summing cuts this recorded mask at the same place."""
    scores, mask = case.outputs["dissimilarity"].float().flatten(), case.outputs["mask"]
    if mask.all():
        return True
    near = (scores - scores[mask].min()).abs() <= BAND[case.meta["dtype"]]
    return not (near & ~mask).any() or len(scores[near].unique()) == 1


MASKS = [case for case in cases("evs_mask") if case.meta["nan_count"] == 0]


def mask_of(case, selection):
    return retention_mask(
        case.inputs["embeds"], tuple(case.meta["thw"]), case.meta["merge"], case.meta["q"], selection
    )


@pytest.mark.seconds
@pytest.mark.parametrize(("form", "dtype"), QUICK)
def test_recorded_masks_with_a_clean_cut_are_equal_in_every_form(build, form, dtype):
    selection = build(EXACT, form, dtype)
    clean = [case for case in MASKS if is_clean(case)]
    assert len(clean) == 57
    chosen = [case for case in clean if case.meta["dtype"] == dtype]
    assert chosen
    assert [c.meta for c in chosen if not torch.equal(mask_of(c, selection), c.outputs["mask"])] == []


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), QUICK)
def test_recorded_masks_without_a_clean_cut_differ_only_within_the_band(build, form, dtype):
    selection = build(EXACT, form, dtype)
    for case in (case for case in MASKS if case.meta["dtype"] == dtype and not is_clean(case)):
        mask, recorded = mask_of(case, selection), case.outputs["mask"]
        scores = case.outputs["dissimilarity"].double().flatten()
        per_frame = len(mask) // case.meta["thw"][0]
        assert mask[:per_frame].all()
        assert mask.sum() == recorded.sum()
        gap = (scores[mask].sort().values - scores[recorded].sort().values).abs().max()
        assert gap <= BAND[dtype]


def random_case(rng, dtype):
    """Embeddings full of ties: static scenes, zero vectors, signs, halves, one-hot rows, walks."""
    frames, per_frame = rng.randint(2, 8), rng.randint(1, 24)
    width = rng.choice([1, 2, 3, 4, 7, 16, 33, 64, 96])
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    embeds = torch.randn(frames, per_frame, width, generator=generator)
    chance = torch.rand(frames, per_frame, 1, generator=generator)
    forms = {
        "normal": embeds,
        "static": embeds[:1] + (chance < 0.3) * embeds * rng.choice([1e-3, 1e-2, 1.0]),
        "still": embeds[:1].expand_as(embeds),
        "zeros": embeds * (chance < 0.6),
        "signs": embeds.sign(),
        "halves": (embeds * 2).round() / 2,
        "one-hot": (embeds == embeds.amax(-1, keepdim=True)) * chance,
        "walk": (embeds * rng.choice([1.0, 0.01])).cumsum(0),
    }
    scaled = forms[rng.choice(sorted(forms))] * 2.0 ** rng.randint(-12, 8) * rng.uniform(1, 2)
    return scaled.flatten(0, 1).to(dtype), (frames, 1, per_frame)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), QUICK)
def test_snapped_selections_are_the_same_in_every_form(build, form, dtype):
    selection, rng = build(SNAP, form, dtype), random.Random(1)
    different = []
    for number in range(NUM_CASES):
        embeds, grid = random_case(rng, DTYPES[dtype])
        rate = rng.random()
        if not torch.equal(
            prune(embeds, grid, 1, rate, selection).kept, prune(embeds, grid, 1, rate, EVS_SNAP).kept
        ):
            different.append(number)
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_onnx_file_returns_the_rows_bit_for_bit(build, dtype):
    embeds, grid = (
        torch.randn(60, 16, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype]),
        (5, 3, 4),
    )
    pruned = prune(embeds, grid, 1, 0.6, build(SNAP, "onnx", dtype))
    assert pruned.embeds.dtype == DTYPES[dtype]
    assert torch.equal(pruned.embeds, embeds[pruned.kept])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", pytest.param("aoti", marks=pytest.mark.full)])
def test_vidcom2_masks_equal_the_recorded_ones_in_every_form(build, form):
    selection = build(VIDCOM2, form, "float32")
    found = [torch.equal(mask_of(case, selection), case.outputs["mask"]) for case in cases("vidcom2_mask")]
    assert found == [True] * 12


@pytest.mark.slow
def test_a_tensorrt_rtx_engine_builds_from_the_onnx_file(tmp_path):
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    path = write_onnx(SNAP, tmp_path / "snap.onnx", "float32")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(path.read_bytes()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    profile = builder.create_optimization_profile()
    profile.set_shape("embeds", (2, 2, 16), (16, 256, 2048), (64, 256, 4096))
    profile.set_shape("share", (2,), (2048,), (8192,))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None


def test_dtypes_that_are_none_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="dtype 'float64': expected one of bfloat16, float16, float32"):
        write_onnx(EXACT, tmp_path / "evs.onnx", "float64")
