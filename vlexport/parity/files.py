"""L0 of what was read: weights and settings against the files, read here by hand, and the manifest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlexport.bundle import Bundle, Manifest
from vlexport.checkpoint import Checkpoint
from vlexport.codec import Json, canonical, encode
from vlexport.errors import InputError
from vlexport.parity.report import Row
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Faults
from vlexport.specs import Pixels

# Bytes of weights that are read a second time; of larger towers every so many tensors are.
READ_AGAIN = 256 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A colour, and sides that units of 14, 16, 28, 32, 42, 48, 56 and 96 pixels divide.
COLOUR, SIDE = (40, 120, 230), 672


def check_weights(subject: Subject) -> Faults:
    """Hold tensors as the checkpoint gives them to the bytes of its files."""
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    sizes = {name: math.prod(subject.checkpoint.stored(stored).shape) for name, stored in names.items()}
    step = max(1, -(-4 * sum(sizes.values()) // READ_AGAIN))
    chosen = {name: names[name] for name in sorted(names)[::step]}
    raw = dict(raw_tensors(subject.checkpoint.complete(), set(chosen.values())))
    wrong = [
        name
        for name, given in subject.checkpoint.tensors(chosen)
        if not torch.equal(given, raw.get(chosen[name], torch.empty(0)))
    ]
    return {"weights": f"{wrong[0]}, {len(wrong)} in all" if wrong else ""}


def raw_tensors(folder: Path, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Read safetensors: eight bytes of header length, a JSON header, then the values."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name in sorted(names & set(header)):
                start, stop = header[name]["data_offsets"]
                file.seek(8 + length + start)
                values = torch.frombuffer(
                    bytearray(file.read(stop - start)), dtype=DTYPES[header[name]["dtype"]]
                )
                yield name, values.reshape(header[name]["shape"])


def check_levels(subject: Subject) -> Faults:
    """Hold preprocessed pixels of one colour to the mean and deviation that the files name, if they do.

    Resizing does not change them, and neither does the order of values in a row of patches.
    """
    settings = raw_settings(subject.checkpoint)
    mean, std = (settings.get(f"norm_{name}") or settings.get(f"image_{name}") for name in ("mean", "std"))
    if not mean or not std or subject.recipe.row_width(subject.config) % 3:
        return {}
    frames = torch.tensor(COLOUR, dtype=torch.uint8).expand(1, SIDE, SIDE, 3)
    try:
        item = subject.recipe.preprocess(subject.config, Pixels(kind="image", frames=frames.clone()))
    except InputError:
        return {}
    rows = item.patches
    levels = torch.tensor(COLOUR, dtype=torch.float64)
    if settings.get("do_rescale", True):
        levels = levels * settings.get("rescale_factor", 1 / 255)
    if settings.get("do_normalize", True):
        levels = (levels - torch.tensor(mean).double()) / torch.tensor(std).double()
    wanted = levels.sort().values.repeat_interleave(rows.shape[-1] // 3)
    error = float((rows[0].double().sort().values - wanted).abs().max() / wanted.abs().max())
    # A grey level is about 0.01 of that; float32 rounds to 5e-7.
    return {"levels": f"{error:.2g} from what mean and deviation of the files give" if error > 1e-5 else ""}


def raw_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the image processor's settings from the files themselves, or those of config.json."""
    combined = _json(checkpoint, "processor_config.json").get("image_processor")
    alone = _json(checkpoint, "preprocessor_config.json")
    inside = checkpoint.config.get("slice_config")
    settings = [each for each in (combined, alone, inside) if isinstance(each, Mapping) and each]
    return settings[0] if settings else checkpoint.config


def _json(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    path = checkpoint.path / name
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def subject_of(manifest: Manifest) -> str:
    """Return what a report belongs to: the build and the bytes of its payloads, whatever the verdict."""
    files: dict[str, Json] = {name: record.sha256 for name, record in manifest.files.items()}
    return hashlib.sha256(canonical({"key": manifest.key, "files": files})).hexdigest()


def identity_rows(bundle: Bundle, subject: Subject, *, chosen: bool) -> list[Row]:
    """Hold weights and settings of the checkpoint to the manifest; a chosen one may have others."""
    manifest = bundle.manifest
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    same_weights = subject.checkpoint.digest(names) == manifest.checkpoint.weights
    settings = encode(subject.recipe.read_config(subject.checkpoint))
    same_settings = canonical(settings) == canonical(manifest.preprocessing)
    return [
        Row(
            level="L0",
            check=check,
            metrics={"wrong": float(not same)},
            limits={} if chosen and not same else {"wrong": 0.0},
            origin="the manifest names what the engine was built from",
            note="" if same else "the checkpoint is not the one that the bundle was built from",
            given="observed" if chosen and not same else None,
        )
        for check, same in (("weights", same_weights), ("settings", same_settings))
    ]
