"""Inputs that respect the grid, as files that other tools read: right shapes alone make no legal call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.bundle import Bundle, Manifest
from vlexport.errors import InputError, LimitError
from vlexport.os_errors import make_folder
from vlexport.runtime.opening import config_of, recipe_of
from vlexport.specs import Range, ShapeProfile

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.recipe import Recipe

MAX_PATCHES = 4096
LISTING, LOADER = "inputs.json", "data_loader.py"
# Read by `polygraphy run --data-loader-script`; needs torch, because numpy has no bfloat16.
LOADER_SOURCE = '''\
"""Inputs for Polygraphy: one dictionary of tensors for each case that inputs.json lists."""

import json
from pathlib import Path

import torch

HERE = Path(__file__).parent


def load_data():
    for case in json.loads((HERE / "inputs.json").read_text())["cases"]:
        yield {name: _read(**entry) for name, entry in case["inputs"].items()}


def _read(file, dtype, shape):
    content = bytearray((HERE / file).read_bytes())
    return torch.frombuffer(content, dtype=getattr(torch, dtype)).reshape(shape)
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One legal call: the profile that holds it, its number in the engine, and every input."""

    name: str
    profile: str
    number: int
    inputs: Mapping[str, Tensor]


def export_inputs(bundle: Bundle, folder: Path, recipe: str | None = None) -> list[Case]:
    """Write the smallest, a middle and the largest sample of each profile; the folder must not exist."""
    chosen = recipe_of(bundle, recipe)
    config = config_of(bundle, chosen)
    found = list(cases(chosen, config, bundle.manifest))
    if folder.exists():
        raise InputError(f"--output-dir {folder}: exists; a new folder is expected. Name another one.")
    make_folder(folder)
    write_cases(found, folder)
    return found


def profiles_of(manifest: Manifest) -> tuple[ShapeProfile, ...]:
    """Return profiles side by side in the engine, in its order; most engines have one."""
    listed = manifest.options.get("profiles")
    if not isinstance(listed, Mapping) or not listed:
        return (manifest.profile,)
    symbols = {str(symbol): symbol for symbol in manifest.profile.ranges}
    found = []
    # A manifest is sorted; the name of the whole keeps the order.
    for name in sorted(listed, key=manifest.profile.name.split("+").index):
        known: Any = listed[name]
        found.append(ShapeProfile(name, {symbols[each]: Range(*bounds) for each, bounds in known.items()}))
    return tuple(found)


def cases(  # noqa: PLR0913  which of the samples
    recipe: Recipe[Any],
    config: Any,
    manifest: Manifest,
    *,
    most: int = 3,
    max_patches: int = MAX_PATCHES,
    named: Collection[str] | None = None,
) -> Iterator[Case]:
    """Yield samples of the accuracy check inside each profile, smallest first.

    named  only the smallest sample of these names, if one is inside
    """
    from vlexport._build.export import cast_floats
    from vlexport.parity.samples import Sample, SampleRules, samples, token_symbol

    form, dtype = manifest.attention_form, manifest.precision.dtype
    for number, profile in enumerate(profiles_of(manifest)):
        rules = SampleRules(
            profile=profile,
            inputs=manifest.inputs,
            tokens=token_symbol(manifest.outputs),
            form=form,
            max_patches=max_patches,
        )
        fitting = [each for each in samples(recipe, config, rules) if isinstance(each, Sample)]
        if named is not None:
            fitting = [each for each in fitting if each.name in named][:1]
        elif not fitting:
            raise LimitError(
                f"profile '{profile.name}': no sample of at most {max_patches} patches is inside it. "
                "Build with a profile that begins lower."
            )
        last = len(fitting) - 1
        steps = range(most if fitting else 0)
        for place in sorted({round(step * last / max(1, most - 1)) for step in steps}):
            inputs = recipe.prepare(config, fitting[place].items, form)
            name = re.sub(r"[^a-z0-9]+", "-", f"{profile.name} {fitting[place].name}".lower()).strip("-")
            yield Case(name=name, profile=profile.name, number=number, inputs=cast_floats(inputs, dtype))


def write_cases(found: list[Case], folder: Path, *, trtexec: bool = True) -> None:
    """Write for each case a folder of raw little-endian files, a line for trtexec, a Polygraphy script."""
    listed = []
    for case in found:
        (folder / case.name).mkdir()
        files = {name: f"{case.name}/{name}.bin" for name in case.inputs}
        for name, tensor in case.inputs.items():
            write_raw(tensor, folder / files[name])
        if trtexec:
            (folder / case.name / "trtexec.txt").write_text(_flags(case, files) + "\n", encoding="utf-8")
        entries = {name: entry(files[name], tensor) for name, tensor in case.inputs.items()}
        listed.append({"name": case.name, "profile": case.profile, "number": case.number, "inputs": entries})
    (folder / LISTING).write_text(json.dumps({"cases": listed}, indent=1) + "\n", encoding="utf-8")
    (folder / LOADER).write_text(LOADER_SOURCE, encoding="utf-8")


def entry(file: str, tensor: Tensor) -> dict[str, object]:
    """Return what a reader has to know of a raw file."""
    return {"file": file, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def write_raw(tensor: Tensor, path: Path) -> None:
    """Write the bytes of a tensor in C order."""
    import torch

    # A single entry keeps its stride through `contiguous`, and then has no view in bytes.
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    path.write_bytes(whole.view(-1).view(torch.uint8).numpy().tobytes())


def _flags(case: Case, files: Mapping[str, str]) -> str:
    """Return flags for trtexec, relative to the folder of all cases."""
    shapes = ",".join(f"{name}:{'x'.join(map(str, each.shape))}" for name, each in case.inputs.items())
    loaded = ",".join(f"{name}:{file}" for name, file in files.items())
    return f"--useProfile={case.number} --shapes={shapes} --loadInputs={loaded}"
