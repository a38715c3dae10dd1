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
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.checkpoint.config import ConfigView
from vlexport.checkpoint.safetensors import FLOATS, StoredTensor, WeightFiles, Weights, rounded
from vlexport.checkpoint.source import Location, listed, open_inside, read_json
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

_FACTORS = {
    r"\.lora_A\.weight": "A", r"\.lora_B\.weight": "B", r"\.lora_B\.bias": "bias",
    r"\.lora_embedding_A": "embedding_A", r"\.lora_embedding_B": "embedding_B",
    r"\.lora_magnitude_vector(\.weight)?": "magnitude",
}  # fmt: skip
# Fields of PEFT's LoraConfig that record how an adapter was found or trained, not what it does.
# `fan_in_fan_out` is for transformers' Conv1D, which towers do not have; PEFT drops it for every other layer.
_NO_MATTER = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "target_modules exclude_modules lora_dropout layers_to_transform layers_pattern megatron_config "
    "megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config "
    "ensure_weight_tying fan_in_fan_out"
)
_READ = (
    "r lora_alpha rank_pattern alpha_pattern use_rslora use_dora bias lora_bias modules_to_save "
    "init_lora_weights"
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
        """Read the settings and the header of a LoRA; refuse what cannot be folded into weights."""
        folder = Path(source).expanduser()
        _check_folder(folder)
        view = ConfigView(values=read_json(folder, CONFIG), file=str(folder / CONFIG))
        _check_settings(view)
        files = WeightFiles(Location(source=str(source), folder=folder, revision=None, hub_id=None), TENSORS)
        stored = [files.stored(name) for name in files.names()]
        changes = {change.path: change for change in _changes(view, stored, str(folder / TENSORS))}
        return cls(source=str(source), digest=_digest(files), changes=changes, files=files)

    def read(self, change: Change) -> dict[str, torch.Tensor]:
        """Return the tensors of a change in float64, by role; refuse values that are not finite."""
        names = {role: stored.name for role, stored in change.parts.items()}
        found = {}
        for role, tensor in self.files.read(names, None):
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(
                    f"{self.source}: tensor '{names[role]}' holds values that are not finite; expected a "
                    "trained adapter. Save it again, or take an earlier state of its training."
                )
            found[role] = tensor.double()
        return found


class AdaptedWeights:
    """The weights of a checkpoint with an adapter folded in."""

    def __init__(self, base: Weights, adapter: Adapter, source: str) -> None:
        self.base, self.adapter, self.source = base, adapter, source

    def names(self) -> tuple[str, ...]:
        return self.base.names()

    def files(self) -> tuple[str, ...]:
        return self.base.files()

    def stored(self, name: str) -> StoredTensor:
        """Return dtype and shape of one tensor, without reading it."""
        return self.base.stored(name)

    @cached_property
    def changed(self) -> dict[str, Change]:
        """Changes by the name of the stored tensor; one that is not there keeps its own."""
        known = frozenset(self.names())
        found = [(_stored_name(path, known) or path, change) for path, change in self.adapter.changes.items()]
        if len(dict(found)) < len(found):
            raise CheckpointError(
                f"adapter {self.adapter.source} changes a tensor of {self.source} under two names; expected "
                "each once. Save the adapter again."
            )
        return dict(found)

    def check_within(self, names: Collection[str]) -> None:
        """Refuse an adapter that changes other tensors than these, those of a bundle, or does not fit."""
        outside = [name for name in self.changed if name not in names]
        for name, change in self.changed.items() if not outside else ():
            _check_shapes(change, self.stored(name), self.adapter.source)
        if not outside:
            return
        given = f"adapter {self.adapter.source} changes {len(outside)} of {len(self.changed)} tensors outside"
        modules = f"{given} the vision tower and its connector: {listed(outside, 4)}; expected none."
        if len(outside) == len(self.changed):
            raise UnsupportedError(
                f"{modules} It leaves this bundle as it is: build without lora=, and apply the adapter "
                f"where the language model runs."
            )
        raise UnsupportedError(
            f"{modules} A bundle holds tower and connector alone, and half an adapter is none. Merge it into "
            f"the checkpoint with PEFT (merge_and_unload, then save_pretrained) and build from the result."
        )

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield wanted names with their tensors; changed ones are computed in float64 and rounded once."""
        self.check_within(frozenset(self.names()))
        plain = {wanted: name for wanted, name in names.items() if name not in self.changed}
        rest = {wanted: name for wanted, name in names.items() if name in self.changed}
        yield from self.base.read(plain, dtype)
        for wanted, before in self.base.read(rest, "float32"):
            change = self.changed[rest[wanted]]
            weight = folded(before, change, self.adapter.read(change))
            if not bool(weight.isfinite().all()):
                raise CheckpointError(
                    f"adapter {self.adapter.source} makes values of '{rest[wanted]}' that are not finite; "
                    "expected a trained adapter. Save it again, or take an earlier state of its training."
                )
            yield wanted, rounded(rest[wanted], weight, dtype)

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the description of each tensor, with the adapter's digest for those that it changes."""
        found = self.base.describe(names)
        for wanted, name in names.items():
            if name in self.changed:
                found[wanted] += f" {self.adapter.digest}"
        return found


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
    made_OI = torch.empty(weight_OI.shape, dtype=torch.float32)
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
        made_OI[rows] = sums
    return made_OI.reshape(weight.shape)


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
                "adapter with lora=."
            )


def _check_settings(view: ConfigView) -> None:
    """Refuse adapters of other kinds, and settings of LoRA that no sum of weights can express."""
    kind = view.require_str("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{view.file}: 'peft_type' is {kind!r}; expected 'LORA'. Merge the adapter into the checkpoint "
            "with PEFT (merge_and_unload, then save_pretrained) and build from the result."
        )
    for name, value in view.items():
        if value and name not in f"{_NO_MATTER} {_READ}".split():
            raise UnsupportedError(
                f"{view.file}: '{name}' is {value!r:.60}; expected a LoRA without it: what it does to the "
                "weights is not known here. Merge the adapter into the checkpoint with PEFT "
                "(merge_and_unload, then save_pretrained) and build from the result."
            )
    start = dict(view.items()).get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{view.file}: 'init_lora_weights' is {start!r}, which changes the weights of the checkpoint "
            "too; expected an adapter for the checkpoint as it is. Convert it with PEFT: "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )


def _changes(view: ConfigView, stored: Sequence[StoredTensor], where: str) -> Iterator[Change]:
    """Yield what is stored for each parameter."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in stored:
        path, role = _place(view, tensor, where)
        found.setdefault(path, {})[role] = tensor
        if tensor.dtype not in (*FLOATS, "float64"):
            raise CheckpointError(
                f"{where}: tensor '{tensor.name}' is stored as {tensor.dtype}; expected floating point. Save "
                "the adapter again in float32."
            )
    if not found:
        raise CheckpointError(f"{where} holds no tensors; expected those of a LoRA. Save the adapter again.")
    for path, parts in found.items():
        # A bias of the second factor is a change of the layer's own bias.
        module = path.rpartition(".")[0]
        factors = {role: tensor for role, tensor in parts.items() if role != "whole"}
        scale = _scale(view, module, factors, where) if factors else 1.0
        yield Change(path=path, parts=parts, scale=scale)


def _place(view: ConfigView, tensor: StoredTensor, where: str) -> tuple[str, str]:
    """Return the parameter that a tensor of the adapter is for, and its role."""
    name = tensor.name.removeprefix(PREFIX)
    for ending, role in _FACTORS.items():
        if found := re.fullmatch(f"(.+){ending}", name):
            if role == "magnitude" and not view.get_bool("use_dora", False):
                break
            return f"{found[1]}.{'bias' if role == 'bias' else 'weight'}", role
    path = name.replace(".base_layer.", ".")
    module, _, last = path.rpartition(".")
    saved = dict(view.items()).get("modules_to_save") or ()
    whole = isinstance(saved, list) and any(f".{each}." in f".{module}." for each in saved)
    trained = last == "bias" and view.get_str("bias", "none") in ("all", "lora_only")
    if tensor.name == name or not module or "lora_" in name or not (whole or trained):
        raise CheckpointError(
            f"{where}: tensor '{tensor.name}' is no part of a LoRA with these settings; expected names as "
            f"{PREFIX}MODULE.lora_A.weight, biases with 'bias' and whole tensors with 'modules_to_save'. "
            "Save the adapter with PEFT's save_pretrained."
        )
    return path, "whole"


def _scale(view: ConfigView, module: str, parts: Mapping[str, StoredTensor], where: str) -> float:
    """Return alpha / r of a module, from patterns where one matches; the stored rank has to be r."""
    rank, alpha = _pattern(view, "rank_pattern", module), _pattern(view, "alpha_pattern", module)
    rank = view.require_size("r", MAX_RANK) if rank is None else rank
    alpha = view.require_float("lora_alpha") if alpha is None else alpha
    if not 1 <= rank <= MAX_RANK or rank != int(rank):
        view.refuse("rank_pattern", rank, f"whole numbers from 1 to {MAX_RANK}")
    if set(parts) != {"bias"}:
        wanted = ["embedding_A", "embedding_B"] if "embedding_A" in parts else ["A", "B"]
        wanted += ["magnitude"] if view.get_bool("use_dora", False) else []
        if set(parts) != set(wanted):
            raise CheckpointError(
                f"{where}: {', '.join(sorted(parts))} of '{module}' found; expected {', '.join(wanted)}, as "
                f"{CONFIG} has it. Check that both files are of one adapter."
            )
        for axis, part in ((axis, parts[kind]) for axis, kind in enumerate(wanted[:2])):
            if part.shape[axis : axis + 1] != (rank,):
                raise CheckpointError(
                    f"{where}: tensor '{part.name}' has shape {list(part.shape)}; expected rank {rank:g} on "
                    f"axis {axis}, as {CONFIG} has it. Check that both files are of one adapter."
                )
    return alpha / (math.sqrt(rank) if view.get_bool("use_rslora", False) else rank)


def _pattern(view: ConfigView, name: str, module: str) -> float | None:
    """Return the value of the first key that matches the end of a module's name, as PEFT finds it."""
    for key, value in view.section(name).items() if view.has(name) else ():
        if len(key) > MAX_PATTERN or "(" in key or sum(map(key.count, "*+?{")) > MAX_REPEATS:
            view.refuse(name, key, f"names of modules, with at most {MAX_REPEATS} repetitions and no groups")
        try:
            matched = re.match(rf"(.*\.)?({key})$", module[:MAX_PATTERN])
        except re.error:
            view.refuse(name, key, "names of modules or regular expressions")
        if matched:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                view.refuse(name, value, "finite numbers")
            return value
    return None


def _stored_name(path: str, known: Collection[str]) -> str | None:
    """Return the checkpoint's name of a parameter: classes have one more `model.` than it, or one less."""
    candidates = (path, path.removeprefix("model."), f"model.{path}")
    return next((each for each in candidates if each in known), None)


def _check_shapes(change: Change, stored: StoredTensor, source: str) -> None:
    """Refuse factors that do not make a tensor of the stored shape."""
    shape, parts = stored.shape, change.parts
    ones = (1,) * (len(shape) - 2)
    wanted: dict[str, tuple[int, ...]] = {"whole": shape, "bias": shape}
    if len(shape) > 1 and "A" in parts:
        rank = parts["A"].shape[0]
        wanted |= {"A": (rank, *shape[1:]), "B": (shape[0], rank, *ones)}
    if len(shape) == 2 and "embedding_A" in parts:
        rank = parts["embedding_A"].shape[0]
        wanted |= {"embedding_A": (rank, shape[0]), "embedding_B": (shape[1], rank)}
    for role, part in parts.items():
        # A vector, which PEFT keeps in the shape of a layer's output.
        sizes = (math.prod(part.shape),) if role == "magnitude" else part.shape
        expected = shape[:1] if role == "magnitude" and "A" in parts else wanted.get(role)
        if sizes != expected:
            raise CheckpointError(
                f"adapter {source}: tensor '{part.name}' has shape {list(part.shape)}; expected "
                f"{list(expected) if expected else 'none'}, for '{stored.name}' {list(shape)} of the "
                "checkpoint. Check that the adapter was trained on this model."
            )
    if stored.dtype not in (*FLOATS, "float64"):
        raise CheckpointError(
            f"adapter {source} changes '{stored.name}', which is stored as {stored.dtype}; expected floating "
            "point. Check that the adapter was trained on this model."
        )


def _digest(files: WeightFiles) -> str:
    """Return the SHA-256 over both files of an adapter."""
    whole = hashlib.sha256(b"vlexport adapter 1\n")
    with open_inside(files.location.folder, CONFIG) as settings, files.open(TENSORS) as tensors:
        for file in (settings, tensors):
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
