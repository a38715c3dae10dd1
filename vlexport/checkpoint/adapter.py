"""A LoRA as PEFT stores it, folded into the weights of a checkpoint while they are read.

    W + scale * B A,  scale = alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA
    DoRA: each row of that has the stored magnitude as its norm

Sums are taken element by element in float64, in a fixed order: a library's matrix product gives other last
bits with other threads and on other processors, and a bundle's weights are compared bit for bit wherever it
is checked. Files that hold pickles are never read.   O outputs of a layer, I inputs, R rank.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.checkpoint.config import ConfigView, read_config
from vlexport.checkpoint.files import ComputedWeights, StoredTensor, WeightFiles, Weights, rounded
from vlexport.checkpoint.source import Location, listed, open_inside
from vlexport.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Ranks in use go to 1,024.
MAX_RANK = 2**14
PREFIX = "base_model.model."
# Of a pattern of module names: a hostile one takes for ever.
MAX_PATTERN, MAX_REPEATS = 512, 2
# Values of a block of rows that stays in a processor's cache.
BLOCK = 2**15
FLOATING = ("float32", "bfloat16", "float16", "float64")
MERGE = (
    "Merge the adapter into the checkpoint with PEFT (merge_and_unload, then save_pretrained) and build from "
    "the result."
)
SAVE_AGAIN = "Save it again, or take an earlier state of its training."

_FACTORS = {
    r"\.lora_A\.weight": "A", r"\.lora_B\.weight": "B", r"\.lora_B\.bias": "bias",
    r"\.lora_embedding_A": "embedding_A", r"\.lora_embedding_B": "embedding_B",
    r"\.lora_magnitude_vector(\.weight)?": "magnitude",
}  # fmt: skip
# Fields of PEFT's LoraConfig that are read here, or record how an adapter was found or trained.
# `fan_in_fan_out` is for transformers' Conv1D, which towers do not have; PEFT drops it for every other layer.
_KNOWN = (
    "r lora_alpha rank_pattern alpha_pattern use_rslora use_dora bias lora_bias modules_to_save "
    "init_lora_weights task_type peft_type auto_mapping peft_version base_model_name_or_path revision "
    "inference_mode target_modules exclude_modules lora_dropout layers_to_transform layers_pattern "
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size "
    "runtime_config ensure_weight_tying fan_in_fan_out"
)
# They take something off the weights of the checkpoint before training, which PEFT repeats when it loads
# them.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The tensors of an adapter for one tensor of the checkpoint, by their role; `whole` replaces it."""

    path: str
    parts: Mapping[str, StoredTensor]
    scale: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """A folder with adapter_config.json and adapter_model.safetensors.

    digest   SHA-256 over both files
    changes  by the name that the model's class has for the parameter
    """

    source: str
    digest: str
    changes: Mapping[str, Change] = field(repr=False)
    files: WeightFiles = field(repr=False)

    @classmethod
    def open(cls, source: str | Path) -> Adapter:
        folder = Path(os.path.expanduser(source))  # noqa: PTH111  the home of an unknown user stays as typed
        _check_folder(folder)
        settings = read_config(folder, CONFIG)
        _check_settings(settings)
        files = WeightFiles(Location(source=str(source), folder=folder, revision=None, hub_id=None), TENSORS)
        changes = {change.path: change for change in _changes(settings, files, str(folder / TENSORS))}
        digest = hashlib.sha256(b"vlexport adapter 1\n")
        with open_inside(folder, CONFIG) as config, files.open(TENSORS) as tensors:
            for file in (config, tensors):
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return cls(source=str(source), digest=digest.hexdigest(), changes=changes, files=files)

    def read(self, change: Change) -> dict[str, torch.Tensor]:
        names = {role: stored.name for role, stored in change.parts.items()}
        tensors = dict(self.files.read(names, None))
        for role, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(
                    f"{self.source}: tensor '{names[role]}' holds values that are not finite; expected a "
                    f"trained adapter. {SAVE_AGAIN}"
                )
        return {role: tensor.double() for role, tensor in tensors.items()}


class AdaptedWeights(ComputedWeights):
    """The weights of a checkpoint with an adapter folded in."""

    def __init__(self, base: Weights, adapter: Adapter, source: str) -> None:
        super().__init__(base)
        self.adapter, self.source = adapter, source

    @cached_property
    def changed(self) -> dict[str, Change]:
        stored = frozenset(self.names())
        # Classes have one more `model.` than the checkpoint, or one less.
        changed = {
            next(
                (name for name in (path, path.removeprefix("model."), f"model.{path}") if name in stored),
                path,
            ): change
            for path, change in self.adapter.changes.items()
        }
        if len(changed) < len(self.adapter.changes):
            raise CheckpointError(
                f"adapter {self.adapter.source} changes a tensor of {self.source} under two names; expected "
                "each once. Save the adapter again."
            )
        return changed

    def check_within(self, names: Collection[str]) -> None:
        """Refuse an adapter that changes other tensors than these, those of a bundle, or does not fit."""
        outside = [name for name in self.changed if name not in names]
        if not outside:
            for name, change in self.changed.items():
                _check_shapes(change, self.stored(name), self.adapter.source)
            return
        if len(outside) == len(self.changed):
            todo = (
                "It leaves this bundle as it is: build without lora, and apply the adapter where the "
                "language model runs."
            )
        else:
            todo = f"A bundle holds tower and connector alone, and half an adapter is none. {MERGE}"
        raise UnsupportedError(
            f"adapter {self.adapter.source} changes {len(outside)} of {len(self.changed)} tensors outside "
            f"the vision tower and its connector: {listed(outside, 4)}; expected none. {todo}"
        )

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        self.check_within(frozenset(self.names()))
        return super().read(names, dtype)

    def computes(self, name: str) -> bool:
        return name in self.changed

    def compute(self, name: str, dtype: str | None) -> torch.Tensor:
        ((_, before),) = self.base.read({name: name}, "float32")
        change = self.changed[name]
        weight = folded(before, change, self.adapter.read(change))
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"adapter {self.adapter.source} makes values of '{name}' that are not finite; expected a "
                f"trained adapter. {SAVE_AGAIN}"
            )
        return rounded(name, weight, dtype)

    def description(self, key: str, name: str) -> str:
        return f"{self.base.describe({key: name})[key]} {self.adapter.digest}"


def folded(weight: torch.Tensor, change: Change, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the checkpoint as the adapter changes it, in float32."""
    import torch

    weight = parts.get("whole", weight)
    if "bias" in parts:
        weight = weight.double() + change.scale * parts["bias"]
    if not {"A", "embedding_A"} & set(parts):
        return weight.float()
    if "embedding_A" in parts:
        left_OR, right_RI = parts["embedding_A"].T, parts["embedding_B"].T
    else:
        left_OR, right_RI = parts["B"].flatten(1), parts["A"].flatten(1)
    weight_OI = weight.flatten(1)
    folded_OI = torch.empty(weight_OI.shape, dtype=torch.float32)
    step = max(1, BLOCK // max(1, weight_OI.shape[1]))
    for begin in range(0, len(weight_OI), step):
        rows = slice(begin, begin + step)
        sums, product = (torch.zeros(weight_OI[rows].shape, dtype=torch.float64) for _ in range(2))
        for rank in range(len(right_RI)):
            torch.mul(left_OR[rows, rank : rank + 1], right_RI[rank], out=product)
            sums += product
        sums = weight_OI[rows].double() + change.scale * sums
        if "magnitude" in parts:
            sums *= (parts["magnitude"].flatten()[rows] / _norms(sums))[:, None]
        folded_OI[rows] = sums
    return folded_OI.reshape(weight.shape)


def _norms(rows_OI: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row; halves are added to each other, the same way on every processor."""
    import torch

    squares = rows_OI.square()
    while squares.shape[1] > 1:
        squares = torch.nn.functional.pad(squares, (0, squares.shape[1] % 2))
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0].sqrt()


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"adapter '{folder}' {what}; expected the folder that PEFT's save_pretrained wrote, with "
            f"{CONFIG} and {TENSORS}. Check the path."
        )
    if (folder / PICKLE).exists():
        raise CheckpointError(
            f"adapter {folder} holds {PICKLE}, a pickle; expected {TENSORS} alone. Loading a pickle runs "
            "code, so vlexport never does, and nothing shows which of two files is newer. Load it "
            "with PEFT, save it with save_pretrained(safe_serialization=True), and remove the .bin."
        )
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file() and not (folder / name).is_symlink():
            raise CheckpointError(
                f"adapter {folder} holds no {name}; expected {CONFIG} and {TENSORS}, as PEFT's "
                "save_pretrained writes them. Check the path: a checkpoint is given as CHECKPOINT, its "
                "adapter as lora."
            )


def _check_settings(settings: ConfigView) -> None:
    kind = settings.require_str("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{settings.file}: 'peft_type' is {kind!r}; expected 'LORA'. {MERGE}")
    for name, value in settings.items():
        if value and name not in _KNOWN.split():
            raise UnsupportedError(
                f"{settings.file}: '{name}' is {value!r:.60}; expected a LoRA without it: what it does to "
                f"the weights is not known here. {MERGE}"
            )
    start = settings.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{settings.file}: 'init_lora_weights' is {start!r}, which changes the weights of the checkpoint "
            "too; expected an adapter for the checkpoint as it is. Convert it with PEFT: "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )


def _changes(settings: ConfigView, files: WeightFiles, where: str) -> Iterator[Change]:
    parameters: dict[str, dict[str, StoredTensor]] = {}
    for tensor in map(files.stored, files.names()):
        path, role = _place(settings, tensor.name, where)
        parameters.setdefault(path, {})[role] = tensor
        if tensor.dtype not in FLOATING:
            raise CheckpointError(
                f"{where}: tensor '{tensor.name}' is stored as {tensor.dtype}; expected floating point. Save "
                "the adapter again in float32."
            )
    if not parameters:
        raise CheckpointError(f"{where} holds no tensors; expected those of a LoRA. Save the adapter again.")
    for path, parts in parameters.items():
        # A bias of the second factor is a change of the layer's own bias.
        scale = 1.0 if set(parts) == {"whole"} else _scale(settings, path.rpartition(".")[0], parts, where)
        yield Change(path=path, parts=parts, scale=scale)


def _place(settings: ConfigView, stored: str, where: str) -> tuple[str, str]:
    name = stored.removeprefix(PREFIX)
    for ending, role in _FACTORS.items():
        if match := re.fullmatch(f"(.+){ending}", name):
            if role == "magnitude" and not settings.get_bool("use_dora", False):
                break
            return f"{match[1]}.{'bias' if role == 'bias' else 'weight'}", role
    path = name.replace(".base_layer.", ".")
    module, _, last = path.rpartition(".")
    saved = settings.values.get("modules_to_save")
    whole = isinstance(saved, list) and any(f".{ending}." in f".{module}." for ending in saved)
    trained = last == "bias" and settings.get_str("bias", "none") in ("all", "lora_only")
    if stored == name or not module or "lora_" in name or not (whole or trained):
        raise CheckpointError(
            f"{where}: tensor '{stored}' is no part of a LoRA with these settings; expected names as "
            f"{PREFIX}MODULE.lora_A.weight, biases with 'bias' and whole tensors with 'modules_to_save'. "
            "Save the adapter with PEFT's save_pretrained."
        )
    return path, "whole"


def _scale(settings: ConfigView, module: str, parts: Mapping[str, StoredTensor], where: str) -> float:
    rank, alpha = _pattern(settings, "rank_pattern", module), _pattern(settings, "alpha_pattern", module)
    rank = settings.require_size("r", MAX_RANK) if rank is None else rank
    alpha = settings.require_float("lora_alpha") if alpha is None else alpha
    if not 1 <= rank <= MAX_RANK or rank != int(rank):
        settings.refuse("rank_pattern", rank, f"whole numbers from 1 to {MAX_RANK}")
    factors = set(parts) - {"whole"}
    if factors != {"bias"}:
        expected = ["embedding_A", "embedding_B"] if "embedding_A" in factors else ["A", "B"]
        expected += ["magnitude"] if settings.get_bool("use_dora", False) else []
        if factors != set(expected):
            raise CheckpointError(
                f"{where}: {', '.join(sorted(factors))} of '{module}' found; expected {', '.join(expected)}, "
                f"as {CONFIG} has it. Check that both files are of one adapter."
            )
        for axis, role in enumerate(expected[:2]):
            factor = parts[role]
            if factor.shape[axis : axis + 1] != (rank,):
                raise CheckpointError(
                    f"{where}: tensor '{factor.name}' has shape {list(factor.shape)}; expected rank {rank:g} "
                    f"on axis {axis}, as {CONFIG} has it. Check that both files are of one adapter."
                )
    return alpha / (math.sqrt(rank) if settings.get_bool("use_rslora", False) else rank)


def _pattern(settings: ConfigView, name: str, module: str) -> float | None:
    """Return the value of the first key that matches the end of a module's name, as PEFT finds it."""
    for key, value in settings.section(name).items() if settings.has(name) else ():
        if len(key) > MAX_PATTERN or "(" in key or sum(map(key.count, "*+?{")) > MAX_REPEATS:
            expected = f"names of modules, with at most {MAX_REPEATS} repetitions and no groups"
            settings.refuse(name, key, expected)
        try:
            matched = re.match(rf"(.*\.)?({key})$", module[:MAX_PATTERN])
        except re.error:
            settings.refuse(name, key, "names of modules or regular expressions")
        if matched:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                settings.refuse(name, value, "finite numbers")
            return value
    return None


def _check_shapes(change: Change, stored: StoredTensor, source: str) -> None:
    shape, parts = stored.shape, change.parts
    expected: dict[str, tuple[int, ...]] = {"whole": shape, "bias": shape}
    if len(shape) > 1 and "A" in parts:
        rank = parts["A"].shape[0]
        expected |= {"A": (rank, *shape[1:]), "B": (shape[0], rank, *(1,) * (len(shape) - 2))}
        expected |= {"magnitude": shape[:1]}
    if len(shape) == 2 and "embedding_A" in parts:
        rank = parts["embedding_A"].shape[0]
        expected |= {"embedding_A": (rank, shape[0]), "embedding_B": (shape[1], rank)}
    for role, part in parts.items():
        # A vector, which PEFT keeps in the shape of a layer's output.
        sizes = (math.prod(part.shape),) if role == "magnitude" else part.shape
        if sizes != expected.get(role):
            fault = f"tensor '{part.name}' has shape {list(part.shape)}"
            raise CheckpointError(
                f"adapter {source}: {fault}; expected {list(expected.get(role, ())) or 'none'}, for "
                f"'{stored.name}' {list(shape)} of the checkpoint. Check that the adapter was trained on "
                "this model."
            )
    if stored.dtype not in FLOATING:
        raise CheckpointError(
            f"adapter {source} changes '{stored.name}', which is stored as {stored.dtype}; expected floating "
            "point. Check that the adapter was trained on this model."
        )
