"""Names of builds: whatever changes an input of a build changes its key, wherever in that input it lies."""

import json
import shutil
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.sources import source_digest
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.key import build_key
from vlexport._build.request import request
from vlexport._build.spec import BuildSpec
from vlexport.backends import find_backend
from vlexport.backends._tensorrt.backend import TensorRtOptions
from vlexport.bundle.files import check_payload, copy_payload, read_payload, record_of
from vlexport.bundle.manifest import key_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import BundleError
from vlexport.specs import Range, ShapeProfile

BACKEND = find_backend("onnxruntime")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> BuildSpec:
    """Of a tower of more than a megabyte, most of it in single tensors of hundreds of kilobytes."""
    path = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("keys") / "checkpoint", depth=2, hidden=128)
    return request(Checkpoint.open(path), backend=BACKEND.name)


def digest(spec: BuildSpec) -> str:
    return key_of(build_key(spec))


def versioned(spec: BuildSpec, **versions: str) -> BuildSpec:
    """The same request to a backend that reports these versions."""
    given = {**BACKEND.versions(), **versions}

    class Other(type(BACKEND)):  # type: ignore[misc]
        def versions(self) -> dict[str, str]:
            return given

    return replace(spec, backend=Other())


def test_every_version_that_a_backend_reports_is_in_the_key(spec: BuildSpec) -> None:
    base = digest(versioned(spec))
    for name in BACKEND.versions():
        assert digest(versioned(spec, **{name: "0.0.0"})) != base, name


def test_backends_report_all_that_makes_an_engine() -> None:
    """torch traces for all; whatever goes through ONNX is written by its two libraries."""
    for name in ("eager", "inductor", "onnxruntime", "openvino", "tensorrt_rtx"):
        versions = find_backend(name).versions()
        wanted = {"torch"} | ({"onnx", "onnxscript"} if name not in ("eager", "inductor") else set())
        assert wanted <= set(versions), name
        assert all(versions.values()), name


def test_every_field_of_a_request_is_in_the_key_or_changes_no_result(spec: BuildSpec) -> None:
    profile = spec.profile
    assert profile is not None
    narrow = {symbol: Range(known.min, known.opt, known.opt) for symbol, known in profile.ranges.items()}
    changes: dict[str, Any] = {
        "recipe": replace(spec.recipe, digest="f" * 64),
        "backend": find_backend("eager"),
        "selector": "vidcom2",
        "cells": ("static",),
        "form": "padded",
        "profile": ShapeProfile(profile.name, narrow),
    }
    scheme = next(each.quantisation for each in BACKEND.capabilities if each.quantisation)
    precisions: dict[str, Any] = {
        "dtype": "float16",
        "fp32_layers": {"norm": "float32"},
        "quantisation": scheme,
    }
    base = digest(spec)
    for name, value in changes.items():
        assert digest(replace(spec, **{name: value})) != base, name
    for name, value in precisions.items():
        assert digest(replace(spec, precision=replace(spec.precision, **{name: value}))) != base, name
    assert {field.name for field in fields(spec.precision)} == set(precisions)
    # Tests below change the checkpoint, and with it config and tensors; a place changes no bundle.
    others = {"checkpoint", "config", "tensors", "precision", "output_dir", "options"}
    assert {field.name for field in fields(spec)} - set(changes) == others


def test_every_option_is_in_the_key_but_those_of_one_process(spec: BuildSpec) -> None:
    left = {field.name for field in fields(TensorRtOptions)} - set(TensorRtOptions().to_json())
    assert left == {"threads", "device", "shared_weights", "limits"}
    options = (TensorRtOptions(), TensorRtOptions(targets=("sm80",)), TensorRtOptions(targets=("sm90",)))
    assert len({digest(replace(spec, options=each)) for each in options}) == len(options)


def rewritten(spec: BuildSpec, folder, change) -> str:
    """The key after a change to the checkpoint's files in a copy."""
    copy = shutil.copytree(spec.checkpoint.path, folder / "copy")
    change(copy)
    return digest(request(Checkpoint.open(copy), backend=BACKEND.name))


@pytest.mark.seconds
def test_any_byte_of_any_weight_is_in_the_key(spec: BuildSpec, tmp_path) -> None:
    """One bit at the start, in the middle and at the end of the largest tensors of the tower."""
    names = spec.recipe.weight_names(spec.checkpoint, spec.recipe.read_config(spec.checkpoint)).values()
    tensors = load_file(spec.checkpoint.path / "model.safetensors")
    sizes = {name: tensors[name].numel() for name in names}
    largest = sorted(sizes, key=lambda name: sizes[name])[-3:]
    assert sum(sizes.values()) * 4 > 1 << 20
    found = [digest(spec)]
    for name in [*largest, min(sizes, key=lambda name: sizes[name])]:
        for at in (0, sizes[name] // 2, sizes[name] - 1):
            changed = {key: value.clone() for key, value in tensors.items()}
            bits = changed[name].view(-1)[at : at + 1].view(torch.int32)
            bits ^= 1

            def change(folder, changed=changed):
                save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

            found.append(rewritten(spec, tmp_path / f"{len(found)}", change))
    assert len(set(found)) == len(found)


def test_one_tensor_larger_than_any_buffer_is_hashed_to_its_end(tmp_path) -> None:
    """A flipped byte behind 1, 8 and 40 MiB of one tensor."""
    tensor = torch.zeros(41 << 20, dtype=torch.uint8)
    digests = []
    for number, at in enumerate((None, (1 << 20) + 1, (8 << 20) + 1, 40 << 20, (41 << 20) - 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if at is not None:
            tensor[at] ^= 1
        (folder / "config.json").write_text("{}")
        save_file({"large": tensor}, folder / "model.safetensors")
        digests.append(Checkpoint.open(folder).digest(["large"]))
    assert len(set(digests)) == len(digests)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "file", ["config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
)
def test_every_setting_of_the_processors_and_of_the_config_is_in_the_key(spec, tmp_path, file):
    settings = json.loads((spec.checkpoint.path / file).read_text())
    names = settings if file == "config.json" else ["image_mean", "image_std", "size", "rescale_factor"]
    names = [
        name for name in names if name not in ("model_type", "architectures", "vision_config", "text_config")
    ]
    if file == "video_preprocessor_config.json":
        names = ["size"]
    base = digest(spec)
    for name in names:

        def change(folder, name=name):
            value = settings[name]
            (folder / file).write_text(json.dumps({**settings, name: other(value)}))
            if name in ("image_mean", "image_std", "rescale_factor"):
                both(folder, name, other(value))

        assert rewritten(spec, tmp_path / name, change) != base, name


def other(value):
    if isinstance(value, dict):
        return {key: other(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*value[:-1], other(value[-1])]
    return value + "x" if isinstance(value, str) else not value if isinstance(value, bool) else value * 2 + 1


def both(folder, name, value) -> None:
    """Images and videos are normalised alike."""
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, name: value}))


def test_a_byte_anywhere_in_a_source_of_the_library_is_in_the_key(tmp_path) -> None:
    source = tmp_path / "source.py"
    text = bytearray(b"#" * (3 << 20))
    source.write_bytes(text)
    found = [source_digest(source)]
    for at in (0, 1 << 20, (2 << 20) + 7, len(text) - 1):
        text[at] ^= 1
        source.write_bytes(text)
        found.append(source_digest(source))
    assert len(set(found)) == len(found)


def test_a_byte_anywhere_in_a_payload_is_seen_by_whatever_reads_it(tmp_path) -> None:
    path = tmp_path / "payload"
    for at in (0, (1 << 20) + 1, (8 << 20) + 1, (41 << 20) - 1):
        with path.open("wb") as file:
            file.truncate(41 << 20)
        record = record_of(tmp_path, "payload")
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"1")
        assert record_of(tmp_path, "payload") != record, at
        for look in (check_payload, read_payload):
            with pytest.raises(BundleError, match="has SHA-256"):
                look(tmp_path, "payload", record)
        with pytest.raises(BundleError, match="has SHA-256"):
            copy_payload(tmp_path, "payload", record, tmp_path / f"copied-{at}")
