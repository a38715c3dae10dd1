"""Damaged bundles, adapters and quantised weights are refused before use, or read as finite numbers."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import memory
from tests.adapters import write_adapter
from tests.bundle.examples import MANIFEST, store, write
from tests.quantised import FORMATS, write_quantised
from tests.strangers.mutations import mutate_bytes, mutate_json
from tests.thirty import cases
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.backends import find_backend
from vlexport.bundle import MANIFEST_NAME, Bundle
from vlexport.bundle.manifest import Manifest, RecipeIdentity
from vlexport.bundle.store import staged
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UNEXPECTED, BundleError, MisfitError, VlexportError
from vlexport.recipe import find_recipe
from vlexport.runtime.encoder import EngineSession
from vlexport.system import give_back

MEBI = 2**20


# Long enough to be cut at several boundaries of 4 KiB.
LONG = {"engine.bin": bytes(range(256)) * 160, "weights/tower.data": b"weights." * 3000, "card.md": b"# Card"}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of the backend's loader, which a refused bundle never reaches."""
    found: list[object] = []
    monkeypatch.setattr(type(find_backend("eager")), "open", lambda *given: found.append(given))
    return found


def damaged(content: dict[str, bytes], seed: int) -> dict[str, bytes]:
    dice = random.Random(seed)
    name = dice.choice(sorted(content))
    if seed % 4 == 0:
        return {MANIFEST_NAME: mutate_json(content[MANIFEST_NAME], MANIFEST_NAME, seed).content}
    if seed % 4 == 1:
        return {name: mutate_bytes(content[name], name, seed).content}
    if seed % 4 == 2:
        # At every 4 KiB in turn.
        return {name: content[name][: seed // 4 * 4096 % len(content[name])]}
    other = dice.choice([each for each in sorted(content) if content[each] != content[name]])
    return {name: content[other], other: content[name]}


def opened_and_read(path: Path, changed: Iterable[str], data: Path) -> None:
    """Open a bundle as every verb does, and read what was changed."""
    found = Bundle.open(path, verify="lazy", user_data=data)
    for name in changed:
        found.read(name)


@pytest.mark.seconds
def test_damaged_bundles_are_refused_before_a_changed_byte_is_handed_out(tmp_path, record_property):
    data, count = tmp_path / "data", cases("damaged bundles")
    bundle = store(tmp_path, data, payloads=LONG).path
    sound = {name: (bundle / name).read_bytes() for name in (MANIFEST_NAME, *LONG)}
    opened_and_read(bundle, LONG, data)
    listing = sorted(tmp_path.rglob("*"))
    give_back()
    memory.forget_peak()
    before, longest, refused = memory.own(), 0.0, 0
    for seed in range(count):
        changed = {name: new for name, new in damaged(sound, seed).items() if new != sound[name]}
        for name, content in changed.items():
            (bundle / name).write_bytes(content)
        begun = time.process_time()
        if changed:
            with pytest.raises(BundleError) as caught:
                opened_and_read(bundle, changed, data)
            assert caught.value.exit_code == 5, seed
            with pytest.raises(BundleError):
                Bundle.open(bundle, user_data=data)
            refused += 1
        longest = max(longest, time.process_time() - begun)
        for name in changed:
            (bundle / name).write_bytes(sound[name])
    opened_and_read(bundle, LONG, data)
    assert memory.own_peak() - before < 64 * MEBI
    assert sorted(tmp_path.rglob("*")) == listing
    assert longest < 1.0
    assert refused > 0.95 * count
    record_property("damaged bundles", refused)


def environments(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yield bundles that were built elsewhere, with the field that differs."""
    others = {
        "version": ("0.1", "2.0", "99.1", "2.13.0.post1", "1"),
        "platform": ("windows-x86_64", "macos-arm64", "linux-aarch64", "linux-riscv64", "freebsd-x86_64"),
        "device": ("cuda", "sm75", "sm80", "sm89", "sm90", "sm120", "sm80+sm90"),
        "instruction_set": ("amx", "avx512bf16+amx", "sve2"),
        "torch": ("2.10.0", "2.12.1+cpu", "2.14.0", "3.0.0+cu130"),
    }
    for field, values in others.items():
        for value in values:
            yield (
                field.replace("_", " "),
                replace(manifest, target=replace(manifest.target, **{field: value})),
            )


@pytest.mark.seconds
def test_bundles_of_other_environments_are_refused_with_field_and_command_and_not_loaded(
    tmp_path: Path, loads: list[object], record_property: Callable[[str, object], None]
) -> None:
    recipe = find_recipe("qwen2_5_vl")
    known = RecipeIdentity(name=recipe.name, digest=recipe.digest)
    here = replace(MANIFEST, recipe=known, target=find_backend("eager").target())
    found = list(environments(here))
    for number, (field, manifest) in enumerate(found):
        with staged(tmp_path, str(number)) as staging:
            path = staging.publish(replace(manifest, files=write(staging))).path
        with pytest.raises(MisfitError, match=rf"{field} is .* in the bundle.*vlexport build") as caught:
            EngineSession.open(path)
        assert caught.value.exit_code == 4
    assert loads == []
    record_property("foreign environments", len(found))


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
