"""Adapters folded into weights: as PEFT merges them; refused where no sum of weights is what they do."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from vlexport.checkpoint import Adapter, Checkpoint
from vlexport.errors import CheckpointError, UnsupportedError, VlexportError

RANK = 4
# PEFT adds in float32: 1.5e-7 of the largest weight is the most over these cases; three times that.
ROUNDING = 5e-7


class Block(nn.Module):
    """Layers of every kind that towers have; `proj` is square."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.proj = nn.Linear(12, 12)
        self.mlp = nn.Linear(12, 20, bias=False)


class Tower(nn.Module):
    """A tower as a checkpoint names it, below `visual.`."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv3d(3, 12, (2, 4, 4), bias=False)
        self.flat = nn.Conv2d(3, 12, 1)
        self.places = nn.Embedding(7, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.merger = nn.Linear(12, 8)


class Model(nn.Module):
    """A model whose parameters have one `model.` more than the stored ones, as in transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.visual = Tower()


@dataclass(frozen=True)
class Trained:
    base: Path
    folder: Path
    merged: dict

    def read(self, dtype=None):
        checkpoint = Checkpoint.open(self.base, lora=self.folder)
        return checkpoint.read(checkpoint.tensor_names(), dtype=dtype)


def trained(place, dtype=torch.float32, left_out=(), **settings):
    """Adapt a model with random factors, store them as PEFT does, some settings left out, and merge them."""
    model = Model()
    base = place / "base"
    base.mkdir(parents=True)
    save_file(
        {name[len("model.") :]: each for name, each in model.state_dict().items()}, base / "model.safetensors"
    )
    (base / "config.json").write_text('{"model_type": "none"}')
    chosen = {"r": RANK, "lora_alpha": 24, "target_modules": ["qkv", "proj", "mlp"], **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it resets fan_in_fan_out, and that biases are trained
        adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, **chosen))
        for name, value in adapted.named_parameters():
            if value.requires_grad and "lora_" not in name:
                value.data += torch.randn_like(value)
            if "magnitude" in name:
                value.data *= 1.5
            if "lora_" in name:
                value.data = value.data.to(dtype)
        adapted.save_pretrained(place / "adapter")
        written = place / "adapter" / "adapter_config.json"
        kept = {name: each for name, each in json.loads(written.read_text()).items() if name not in left_out}
        written.write_text(json.dumps(kept))
        fresh = PeftModel.from_pretrained(Model(), place / "adapter")
        merged = fresh.merge_and_unload().state_dict()
    return Trained(base, place / "adapter", {name[len("model.") :]: each for name, each in merged.items()})


CASES: dict[str, dict] = {
    "a scale of its own": {},
    "settings of an older PEFT": {"left_out": ("use_rslora", "use_dora", "lora_bias", "rank_pattern")},
    "rank-stabilised": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"blocks.0.attn.proj": 3, "blocks.0.proj": 2, ".*mlp": 7},
        "alpha_pattern": {"blocks.1.qkv": 5, "model.visual.blocks.0.proj": 3},
    },
    "patterns, rank-stabilised": {
        "rank_pattern": {"proj": 2},
        "alpha_pattern": {"qkv": 3},
        "use_rslora": True,
    },
    "DoRA": {"use_dora": True},
    "DoRA of a convolution": {"use_dora": True, "target_modules": ["patch", "proj"]},
    "convolutions": {"target_modules": ["patch", "flat"]},
    "a table": {"target_modules": ["places"]},
    "fan_in_fan_out of linear layers": {"fan_in_fan_out": True},
    "biases of the second factor": {"lora_bias": True, "target_modules": ["qkv", "proj"]},
    "biases of all layers": {"bias": "all"},
    "a whole module": {"modules_to_save": ["merger"]},
    "more rank than columns": {"r": 40},
}


def test_folded_weights_are_those_that_peft_merges(tmp_path, subtests):
    for place, (name, settings) in enumerate(CASES.items()):
        with subtests.test(name):
            case = trained(tmp_path / str(place), **settings)
            found, before = case.read(), load_file(case.base / "model.safetensors")
            changed = {each for each in before if not torch.equal(case.merged[each], before[each])}
            assert changed, "the case changes nothing"
            assert {each for each in before if not torch.equal(found[each], before[each])} == changed
            for each in changed:
                error = (found[each] - case.merged[each]).abs().max() / case.merged[each].abs().max()
                assert error < ROUNDING, each


def test_factors_in_bfloat16_are_multiplied_in_float64_and_rounded_once(tmp_path):
    case = trained(tmp_path, torch.bfloat16)
    factors = load_file(case.folder / "adapter_model.safetensors")
    down, up = (factors[f"base_model.model.model.visual.blocks.0.proj.lora_{part}.weight"] for part in "AB")
    assert down.dtype == torch.bfloat16
    name = "visual.blocks.0.proj.weight"
    base = load_file(case.base / "model.safetensors")[name]
    wanted = base.double() + 24 / RANK * (up.double() @ down.double())
    assert torch.equal(case.read()[name], wanted.float())
    for dtype in ("bfloat16", "float16"):
        assert torch.equal(case.read(dtype)[name], wanted.float().to(getattr(torch, dtype)))


def test_names_of_the_checkpoint_may_have_the_prefix_too(tmp_path):
    case = trained(tmp_path)
    stored = load_file(case.base / "model.safetensors")
    save_file({f"model.{name}": each for name, each in stored.items()}, case.base / "model.safetensors")
    found = case.read()
    name = "visual.blocks.1.qkv.weight"
    torch.testing.assert_close(found[f"model.{name}"], case.merged[name])


def test_digests_distinguish_adapters_and_what_they_change(tmp_path):
    one, other = trained(tmp_path / "one"), trained(tmp_path / "other", lora_alpha=25)
    plain, first, second = (Checkpoint.open(one.base, lora=lora) for lora in (None, one.folder, other.folder))
    changed, whole = ["visual.blocks.0.proj.weight"], ["visual.merger.weight"]
    assert len({each.digest(changed) for each in (plain, first, second)}) == 3
    assert len({each.digest(whole) for each in (plain, first, second)}) == 1
    assert Adapter.open(one.folder).digest != Adapter.open(other.folder).digest


def rewritten(case, **tensors):
    """Replace tensors of the stored adapter, None removes them; names without what PEFT puts before."""
    path = case.folder / "adapter_model.safetensors"
    stored = load_file(path)
    for ending, value in tensors.items():
        name = f"base_model.model.model.visual.{ending}"
        stored.pop(name, None)
        if value is not None:
            stored[name] = value
    save_file(stored, path)


def configured(case, **fields):
    path = case.folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


A, B = "blocks.0.proj.lora_A.weight", "blocks.0.proj.lora_B.weight"


def remove(case, name):
    (case.folder / name).unlink()


def link_out(case):
    path = case.folder / "adapter_model.safetensors"
    path.rename(case.base.parent / "elsewhere.safetensors")
    path.symlink_to(case.base.parent / "elsewhere.safetensors")


def pickled_too(case):
    torch.save({}, case.folder / "adapter_model.bin")


def pickled_only(case):
    pickled_too(case)
    remove(case, "adapter_model.safetensors")


WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def tensor(name, value):
    return lambda case: rewritten(case, **{name: value})


def setting(**fields):
    return lambda case: configured(case, **fields)


# Those of another kind are not read; all others are damaged.
UNREAD = {"another kind", "a start that changes the base", "an unknown field", "tokens that switch it on"}
DAMAGED = {
    "no settings": (lambda c: remove(c, SETTINGS), r"holds no adapter_config.json"),
    "no tensors": (lambda c: remove(c, WEIGHTS), r"holds no adapter_model.saf"),
    "a pickle": (pickled_only, r"adapter_model.bin, a pickle.*save_pretrained"),
    "a pickle beside": (pickled_too, r"adapter_model.bin, a pickle.*remove the .bin"),
    "a link out of the folder": (link_out, r"is a link to .*outside"),
    "another kind": (setting(peft_type="LOHA"), r"'peft_type' is 'LOHA'.*merge_and"),
    "no kind": (setting(peft_type=None), r"'peft_type' is missing"),
    "a start that changes the base": (
        setting(init_lora_weights="pissa_niter_4"),
        r"'pissa_niter_4'.*Convert",
    ),
    "an unknown field": (setting(use_tomorrow=True), r"'use_tomorrow' is True.*not known here"),
    "tokens that switch it on": (setting(alora_invocation_tokens=[3]), r"alora_invocation_tokens"),
    "another rank": (setting(r=5), r"lora_A.weight' has shape.*expected rank 5"),
    "a huge rank": (setting(r=2**40), r"'r' is 1099511627776; expected .* to 16384"),
    "no rank": (setting(r=0), r"'r' is 0"),
    "a rank that is no number": (setting(r="8"), r"'r' is '8'"),
    "an alpha that is none": (setting(lora_alpha=[1]), r"'lora_alpha' is \[1\]"),
    "a pattern that is none": (setting(rank_pattern={"proj": True}), r"rank_pattern' is True"),
    "a pattern that takes for ever": (
        setting(alpha_pattern={"(a+)+$": 1}),
        r"alpha_pattern' is '\(a\+\)\+\$'",
    ),
    "a broken pattern": (setting(rank_pattern={"[": 1}), r"rank_pattern' is '\['"),
    "a factor alone": (tensor(B, None), r"A of '.*proj' found; expected A, B"),
    "factors of another layer": (
        tensor(A, torch.zeros(RANK, 13)),
        r"lora_A.weight' has shape \[4, 13\]; expected \[4, 12\]",
    ),
    "factors in another order": (
        lambda c: rewritten(c, **{A: torch.zeros(12, RANK), B: torch.zeros(RANK, 12)}),
        r"has shape \[12, 4\]; expected rank 4 on axis 0",
    ),
    "not a number": (
        tensor(A, torch.full((RANK, 12), torch.nan)),
        r"proj.lora_A.weight' holds values that are not finite",
    ),
    "integers": (tensor(A, torch.zeros(RANK, 12, dtype=torch.int8)), r"stored as int8"),
    "a magnitude without DoRA": (
        tensor("blocks.0.proj.lora_magnitude_vector", torch.ones(12)),
        r"lora_magnitude_vector' is no part of a LoRA with these settings",
    ),
    "DoRA without magnitudes": (setting(use_dora=True), r"found; expected A, B, magnitude"),
    "a whole tensor that nobody trained": (
        tensor("merger.weight", torch.zeros(8, 12)),
        r"merger.weight' is no part",
    ),
    "nothing at all": (lambda c: save_file({}, c.folder / WEIGHTS), r"holds no tensors"),
    "a cut file": (
        lambda c: (c.folder / WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0{"),
        r"adapter_model.safetensors is not a sound safetensors file",
    ),
}


def test_adapters_that_are_damaged_or_of_another_kind_are_refused_by_name(tmp_path, subtests):
    whole = trained(tmp_path / "whole")
    for place, (name, (damage, words)) in enumerate(DAMAGED.items()):
        with subtests.test(name):
            case = Trained(whole.base, tmp_path / str(place), {})
            case.folder.mkdir()
            for path in whole.folder.iterdir():
                (case.folder / path.name).write_bytes(path.read_bytes())
            damage(case)
            with pytest.raises(UnsupportedError if name in UNREAD else CheckpointError, match=words):
                case.read()


def test_one_adapter_at_a_time(tmp_path):
    case = trained(tmp_path)
    once = Checkpoint.open(case.base, lora=case.folder)
    with pytest.raises(UnsupportedError, match=r"is read with .* already; expected one"):
        once.adapted(Adapter.open(case.folder))


def test_a_folder_that_is_no_adapter_is_named(tmp_path):
    case = trained(tmp_path)
    for given, words in (
        (tmp_path / "none", "does not exist"),
        ("~an-unknown-user/lora", "does not exist"),
        (case.base, "holds no adapter_config.json"),
    ):
        with pytest.raises(VlexportError, match=words):
            Adapter.open(given)


def test_a_file_that_changes_between_header_and_values_is_refused(tmp_path):
    case = trained(tmp_path)
    checkpoint = Checkpoint.open(case.base, lora=case.folder)
    path = case.folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        checkpoint.read(checkpoint.tensor_names())
