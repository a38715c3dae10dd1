"""Damaged adapters and quantised weights are refused with our own errors, or read as finite numbers."""

import json
import shutil

import pytest

from tests.adapters import write_adapter
from tests.quantised import FORMATS, write_quantised
from tests.strangers.mutations import mutate_bytes, mutate_json
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UNEXPECTED, VlexportError
from vlexport.recipe import find_recipe

RECIPE = find_recipe("qwen2_5_vl")
SEEDS = [range(25), pytest.param(range(25, 250), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "c", depth=1, with_decoder=False)


def faults_of(open_it, name):
    """Return what a stranger's file must not cause, in a list."""
    try:
        checkpoint = open_it()
        names = RECIPE.weight_names(checkpoint, RECIPE.read_config(checkpoint))
        checkpoint.digest(names)
        found = checkpoint.read(names, dtype="float32")
    except VlexportError as error:
        return [] if error.exit_code in (2, 7) else [f"{name}: exit {error.exit_code}: {error}"]
    except UNEXPECTED as error:
        return [f"{name}: {type(error).__name__}: {error}"]
    # Tensors that are stored plainly are read as they are, in every checkpoint.
    made = getattr(checkpoint.weights.base, "packed", names.values())
    odd = [key for key, each in found.items() if names[key] in made and not each.isfinite().all()]
    return [f"{name}: {key} is not finite" for key in odd]


@pytest.mark.parametrize("seeds", SEEDS)
def test_damaged_adapters_are_refused_or_finite(seeds, tiny, tmp_path):
    sound, faults = write_adapter(tmp_path / "sound", Checkpoint.open(tiny)), []
    for seed in seeds:
        for file, mutate in (
            ("adapter_config.json", mutate_json),
            ("adapter_model.safetensors", mutate_bytes),
        ):
            damaged = mutate((sound / file).read_bytes(), file, seed)
            copy = shutil.copytree(sound, tmp_path / "damaged", dirs_exist_ok=True)
            (copy / file).write_bytes(damaged.content)
            faults += faults_of(lambda: Checkpoint.open(tiny, lora=tmp_path / "damaged"), damaged.name)
    assert faults == []


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("seeds", SEEDS)
def test_damaged_quantised_weights_are_refused_or_finite(seeds, kind, tiny, tmp_path):
    sound, faults = write_quantised(tmp_path / "sound", tiny, kind), []
    config = json.loads((sound / "config.json").read_text())
    settings = json.dumps(config.pop("quantization_config")).encode()
    for seed in list(seeds)[:: 1 if len(seeds) > 100 else 3]:
        for damaged in (
            mutate_json(settings, f"{kind}.json", seed),
            mutate_bytes((sound / "model.safetensors").read_bytes(), "model.safetensors", seed),
        ):
            copy = shutil.copytree(sound, tmp_path / "damaged", dirs_exist_ok=True)
            if damaged.file == "model.safetensors":
                (copy / damaged.file).write_bytes(damaged.content)
            else:
                text = (
                    json.dumps(config)[:-1].encode() + b', "quantization_config": ' + damaged.content + b"}"
                )
                (copy / "config.json").write_bytes(text)
            faults += faults_of(lambda: Checkpoint.open(tmp_path / "damaged"), f"{kind}: {damaged.name}")
    assert faults == []
