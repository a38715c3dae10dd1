"""Quantised weights, read as the libraries that stored them do; what is not read is refused by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.golden_data import FOLDER
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.files import JoinedWeights
from vlexport.errors import CheckpointError, UnsupportedError

MODULE = "visual.blocks.0.attn.qkv"
E4M3 = torch.float8_e4m3fn
# Products of two float32 values are exact in float64, so one rounding is all that may differ between
# readings.
ROUNDING = torch.finfo(torch.float32).eps
# bitsandbytes rounds after each of its up to three operations.
STEPS = 3


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """The stored tensors of one module, the settings beside them, and the weight as others read it."""

    settings: dict
    parts: dict
    weight: torch.Tensor
    error: float = 0.0
    others: dict = field(default_factory=dict)

    def write(self, folder, **settings):
        folder.mkdir(parents=True)
        tensors = {f"{MODULE}.{ending}": each.contiguous() for ending, each in self.parts.items()}
        plain = {"visual.norm.weight": torch.ones(3), f"{MODULE}.bias": torch.ones(2), **self.others}
        save_file(tensors | plain, folder / "model.safetensors")
        config = {"model_type": "none", "quantization_config": {**self.settings, **settings}}
        (folder / "config.json").write_text(json.dumps(config))
        return Checkpoint.open(folder)


def fp8(
    shape=(48, 40), grid=(3, 2), block=(16, 20), dtype=torch.float32, method="fp8", name="weight_scale_inv"
):
    """A weight as transformers reads it; where the last block is cut, one by one."""
    stored = (noise(*shape) * 60).to(E4M3)
    scale = (noise(*grid, seed=1).abs() + 0.1).to(dtype)
    rows, columns = (torch.arange(size) // length for size, length in zip(shape, block, strict=True))
    if any(size % blocks for size, blocks in zip(shape, grid, strict=True)):
        weight = stored.float() * scale.float()[rows[:, None], columns]
    else:
        weight = Fp8Dequantize(None)._dequantize_one(stored, scale, torch.float32)
    settings = {"quant_method": method, "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Case(settings, {"weight": stored, name: scale}, weight)


def per_tensor():
    case = fp8(grid=(1, 1), block=(48, 40))
    settings = {**case.settings, "weight_block_size": None, "activation_scheme": "static"}
    scale = {"weight_scale_inv": case.parts["weight_scale_inv"][0, 0], "activation_scale": torch.ones(())}
    return replace(case, settings=settings, parts=case.parts | scale)


def exponents():
    """Scales that are powers of two, stored by their exponents."""
    case = fp8()
    codes = torch.randint(120, 134, (3, 2), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    weight = case.parts["weight"].float() * 2.0 ** (codes.float() - 127).repeat_interleave(
        16, 0
    ).repeat_interleave(20, 1)
    return replace(
        case, parts={**case.parts, "weight_scale_inv": codes.view(torch.float8_e8m0fnu)}, weight=weight
    )


def fbgemm():
    case = fp8(grid=(48, 1), block=(1, 40), method="fbgemm_fp8", name="weight_scale")
    return replace(case, settings={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})


def compressed(kind, shape=(48, 64), **given):
    """A weight that compressed-tensors stored, and reads again."""
    args = QuantizationArgs(**given)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = noise(*shape)
    rows, columns = shape
    sizes = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // (args.group_size or 1))}
    block = args.block_structure or [1, 1]
    sizes["block"] = (-(-rows // block[0]), -(-columns // block[1]))
    largest = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
    scale = (noise(*sizes[args.strategy], seed=1).abs() + 2.0) / largest
    state = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        low = -(2 ** (args.num_bits - 1))
        state["weight_zero_point"] = torch.randint(low, -low, scale.shape, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    found = compressor.decompress(dict(stored), scheme)["weight"]
    weights = json.loads(args.model_dump_json())
    settings = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*merger.*"],
        "quantization_status": "compressed",
    }
    return Case(settings, stored, found)


def ordered():
    """Integers of four bits whose groups are in the order of activations."""
    case = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)) // 16
    plain = case.weight / case.parts["weight_scale"].repeat_interleave(16, 1)
    weight = plain.round() * case.parts["weight_scale"][:, order]
    return replace(case, parts=case.parts | {"weight_g_idx": order.int()}, weight=weight)


def zeroed():
    """Symmetric integers of an older version, which stored zeros too."""
    case = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16)
    return replace(case, parts=case.parts | {"weight_zero_point": torch.zeros(48, 4, dtype=torch.int8)})


def recorded(key, error=0.0, **settings):
    """Return what AutoAWQ 0.2.9, GPTQModel 7.7.0 or bitsandbytes 0.50.2 read; the first two random words.

    Of bitsandbytes its operation in torch: its kernel for processors takes the sizes of other runs where
    rows are no multiple of a run (160x112 in runs of 64: twice the error).
    """
    with np.load(FOLDER / "quantised.npz") as stored:
        parts = {
            name.partition("|")[2]: torch.from_numpy(stored[name])
            for name in stored.files
            if name.partition("|")[0] == key
        }
    weight = parts.pop("weight")
    parts = {"weight" if name == "packed" else name: each for name, each in parts.items()}
    return Case(settings, parts, weight, error)


def awq(**settings):
    return recorded("awq", quant_method="awq", bits=4, version="gemm", group_size=16, **settings)


def gptq(key, bits, **version):
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": True, "sym": False}
    return recorded(key, **version, **settings)


def four_bits(key):
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": key[:3]}
    return recorded(f"bnb {key}", STEPS * ROUNDING, **settings)


def eight_bits():
    return recorded("bnb int8", STEPS * ROUNDING, quant_method="bitsandbytes", load_in_8bit=True)


FLOAT = partial(compressed, "float-quantized", num_bits=8, type="float")
ROWS = partial(compressed, "int-quantized", num_bits=8, strategy="channel")
WORDS = partial(compressed, "pack-quantized", num_bits=4)
IN_GROUPS = partial(WORDS, strategy="group", group_size=16)
CASES: dict[str, Callable[[], Case]] = {
    "fp8 by blocks": fp8,
    "fp8, scales in bfloat16": partial(fp8, dtype=torch.bfloat16),
    "fp8, last blocks cut": partial(fp8, shape=(50, 41), grid=(4, 3)),
    "fp8 per tensor, static activations": per_tensor,
    "fp8, scales as exponents": exponents,
    "fbgemm": fbgemm,
    "float8 per tensor": partial(FLOAT, strategy="tensor"),
    "float8 per row": partial(FLOAT, strategy="channel"),
    "float8 by blocks": partial(FLOAT, strategy="block", block_structure=[16, 32]),
    "int8 per row": ROWS,
    "int8 per row, with zeros": partial(ROWS, symmetric=False),
    "int8 per group": partial(compressed, "naive-quantized", num_bits=8, strategy="group", group_size=16),
    "int4 in words": IN_GROUPS,
    "int4 in words, with zeros": partial(IN_GROUPS, symmetric=False),
    "int4 in words, odd sizes": partial(WORDS, shape=(50, 42), strategy="channel", symmetric=False),
    "int4 in words, ordered": ordered,
    "int4 in words, with zeros that do not count": zeroed,
    "int8 in words": partial(compressed, "pack-quantized", (9, 30), num_bits=8, strategy="channel"),
    "awq": awq,
    **{
        f"{version} in {bits} bits{order}": partial(
            gptq, f"{version}.{bits}{order}", bits, checkpoint_format=version
        )
        for version in ("gptq", "gptq_v2")
        for bits in (2, 4, 8)
        for order in ("", ".order")
    },
    # Older files do not name it.
    "gptq, no format named": lambda: gptq("gptq.4", 4),
    **{
        kind: partial(four_bits, kind)
        for kind in ("nf4", "nf4 nested", "nf4 odd", "nf4 many runs", "fp4", "fp4 nested")
    },
    "int8 of bitsandbytes": eight_bits,
}


def near(given, wanted, error):
    return bool(((given - wanted).abs() <= error * wanted.abs().max()).all())


def test_weights_are_those_that_the_library_of_the_format_reads(tmp_path, subtests):
    for place, (name, make) in enumerate(CASES.items()):
        with subtests.test(name):
            case = make()
            checkpoint = case.write(tmp_path / str(place))
            names = checkpoint.tensor_names()
            assert names == (f"{MODULE}.bias", f"{MODULE}.weight", "visual.norm.weight")
            stored = checkpoint.stored(f"{MODULE}.weight")
            assert (stored.shape, stored.dtype) == (tuple(case.weight.shape), "float32")
            found = checkpoint.read(names)[f"{MODULE}.weight"]
            assert found.dtype == torch.float32
            assert near(found, case.weight.float(), case.error)
            half = checkpoint.read(names, dtype="bfloat16")[f"{MODULE}.weight"]
            assert torch.equal(half, found.bfloat16())
            assert checkpoint.quantised(names) == f"{case.settings['quant_method']}, 1 of 3 tensors"


def test_a_tower_in_floating_point_is_read_as_ever_whatever_the_language_model_is(tmp_path):
    other = {"visual.blocks.0.attn.proj.weight": noise(4, 4).bfloat16()}
    for place, (name, settings) in enumerate({"awq": {}, "hqq": {"quant_method": "hqq"}}.items()):
        case = replace(awq(modules_to_not_convert=["visual"]), others=other)
        renamed = {f"model.layers.0.mlp.{ending}": each for ending, each in case.parts.items()}
        checkpoint = replace(case, parts={}, others=other | renamed).write(tmp_path / name, **settings)
        names = [each for each in checkpoint.tensor_names() if each.startswith("visual.")]
        assert torch.equal(
            checkpoint.read(names)["visual.blocks.0.attn.proj.weight"], next(iter(other.values()))
        )
        assert checkpoint.quantised(names) is None
        files = getattr(checkpoint.weights.base, "base", checkpoint.weights.base)
        plain = replace(checkpoint, weights=JoinedWeights(files))
        assert checkpoint.digest(names) == plain.digest(names), place


def test_digests_see_scales_and_settings(tmp_path):
    case = awq()
    names = [f"{MODULE}.weight"]
    scales = case.parts["scales"]
    digests = {
        case.write(tmp_path / "a").digest(names),
        case.write(tmp_path / "b").digest(names),
        case.write(tmp_path / "c", group_size=-1).digest(names),
        replace(case, parts=case.parts | {"scales": scales * 2}).write(tmp_path / "d").digest(names),
    }
    assert len(digests) == 3


def changed(make, **parts):
    """Return a case with other parts; None leaves one out."""

    def changed_case():
        case = make()
        return replace(
            case, parts={name: each for name, each in (case.parts | parts).items() if each is not None}
        )

    return changed_case


def with_settings(make, **settings):
    return lambda: replace(make(), settings={**make().settings, **settings})


AWQ, NF4 = awq, CASES["nf4 nested"]
STATE = "weight.quant_state.bitsandbytes__nf4"
INT4 = CASES["int4 in words"]


def state(**values):
    whole = json.loads(bytes(NF4().parts[STATE].tolist())) | values
    return torch.tensor(list(json.dumps(whole).encode()), dtype=torch.uint8)


# Those of another kind are not read; all others contradict themselves.
UNREAD = {"int4, another shape", "4-bit floating point", "awq for other kernels", "gptq in three bits"}
UNREAD |= {"int8, another order"}
REFUSED = {
    "fp8, too few blocks": (
        changed(fp8, weight_scale_inv=torch.ones(2, 2)),
        r"qkv.weight_scale_inv' has 2 blocks; expected 3 blocks of 16",
    ),
    "fp8, a scale of three axes": (
        changed(fp8, weight_scale_inv=torch.ones(3, 2, 1)),
        r"weight_scale_inv' has shape \[3, 2, 1\]",
    ),
    "fp8, scales that are integers": (
        changed(fp8, weight_scale_inv=torch.ones(3, 2, dtype=torch.int32)),
        r"is stored as int32",
    ),
    "fp8, a scale that is no number": (
        changed(fp8, weight_scale_inv=torch.full((3, 2), torch.nan)),
        r"qkv.weight' .*not finite",
    ),
    "fp8, a scale alone": (changed(fp8, weight=None), r"qkv.weight' is missing; expected it together with"),
    "fp8, a list that names it": (
        with_settings(fp8, modules_to_not_convert=["visual"]),
        r"qkv.weight' is quantised, and 'modules_to_not_convert' lists 'visual'",
    ),
    "fp8 without its scale": (
        changed(fp8, weight_scale_inv=None),
        r"qkv.weight' is stored as F8_E4M3.*quantization_config",
    ),
    "a method that is not read": (
        with_settings(fp8, quant_method="mxfp4"),
        r"qkv.weight' is stored as F8_E4M3",
    ),
    "int4, another shape": (
        changed(INT4, weight_shape=torch.tensor([48, 65])),
        r"qkv.weight' is stored with 4 bits",
    ),
    "int4, no zeros": (
        changed(CASES["int4 in words, with zeros"], weight_zero_point=None),
        r"weight_zero_point' is missing; expected zeros",
    ),
    "int4, a shape that is none": (
        changed(INT4, weight_shape=torch.tensor([[48, 64]])),
        r"weight_shape' has shape \[1, 2\]",
    ),
    "int4, order out of range": (
        changed(INT4, weight_g_idx=torch.full((64,), 9, dtype=torch.int32)),
        r"weight_g_idx' names groups that are not there; expected 0 to 3",
    ),
    "4-bit floating point": (
        changed(INT4, weight_packed=torch.zeros(48, 32, dtype=torch.uint8)),
        r"qkv.weight' is stored with uint8 words, which is not read",
    ),
    "a list with a pattern that names it": (
        with_settings(INT4, ignore=["re:visual.blocks.*"]),
        r"'ignore' lists 're:visual",
    ),
    "awq for other kernels": (
        with_settings(AWQ, version="gemv"),
        r"qkv.weight' is stored with AWQ version 'gemv'",
    ),
    "awq, no zeros": (changed(AWQ, qzeros=None), r"qkv.qzeros' is missing"),
    "awq, other groups": (with_settings(AWQ, group_size=32), r"scales' has shape \[4, 24\].*\[2, 24\]"),
    "awq, groups of nothing": (with_settings(AWQ, group_size=0), r"'.*group_size' is 0"),
    "gptq in three bits": (with_settings(CASES["gptq in 4 bits"], bits=3), r"GPTQ format 'gptq' in 3 bits"),
    "nf4, another shape": (
        changed(NF4, **{STATE: state(shape=[40, 23])}),
        r"qkv.weight' has shape \[480, 1\]",
    ),
    "nf4, a huge shape": (changed(NF4, **{STATE: state(shape=[2**40, 2**40])}), r"qkv.weight' has shape"),
    "nf4, no blocks": (changed(NF4, **{STATE: state(blocksize=0)}), r"'blocksize' is 0"),
    "nf4, a state that is no JSON": (
        changed(NF4, **{STATE: torch.zeros(9, dtype=torch.uint8)}),
        r"nf4' is not valid JSON",
    ),
    "nf4, a huge state": (
        changed(NF4, **{STATE: torch.zeros(2**17, dtype=torch.uint8)}),
        r"has 131072 bytes",
    ),
    "nf4, no state": (changed(NF4, **{STATE: None}), r"weight.quant_state' is missing"),
    "nf4, words of another type": (
        changed(NF4, weight=torch.zeros(240, 1, dtype=torch.int16)),
        r"qkv.weight' is stored as int16",
    ),
    "int8, another order": (
        changed(eight_bits, weight_format=torch.ones((), dtype=torch.uint8)),
        r"weight_format",
    ),
    "settings that are none": (
        with_settings(AWQ, group_size="many"),
        r"'quantization_config.group_size' is 'many'",
    ),
}


def test_what_does_not_fit_or_is_not_read_is_refused_by_the_name_of_the_tensor(tmp_path, subtests):
    for place, (name, (make, words)) in enumerate(REFUSED.items()):
        with subtests.test(name):
            checkpoint = make().write(tmp_path / str(place))
            with pytest.raises(UnsupportedError if name in UNREAD else CheckpointError, match=words):
                checkpoint.read([f"{MODULE}.weight"], dtype="float32")


def test_missing_names_are_explained_by_a_format_that_is_not_read(tmp_path):
    checkpoint = awq().write(tmp_path / "c", quant_method="hqq")
    with pytest.raises(
        CheckpointError, match=r"'quant_method' is 'hqq'; expected one of awq, bitsandbytes, "
    ):
        checkpoint.check_names({"blocks.0.attn.qkv.weight": (24, 64)}, "visual.")
