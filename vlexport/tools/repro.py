"""Legal calls of an engine as files that other tools read, and an archive that a library's makers can run.

The archive has a graph, calls, versions. Inputs respect the grid: right shapes alone make no legal call.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.graph import Graph, TowerSpec
from vlexport.backends import WritesStandalone, backend_names, find_backend
from vlexport.bundle import Bundle, Manifest
from vlexport.errors import InputError, LimitError, UnsupportedError
from vlexport.parity.noise import MOST_RAISED, cap_of
from vlexport.parity.report import report_in
from vlexport.runtime.opening import checkpoint_of, config_of, precision_of, recipe_of, stored_backend
from vlexport.specs import Range, ShapeProfile
from vlexport.system import ONE_BUILD, make_folder
from vlexport.target import device_here, processor_here

if TYPE_CHECKING:
    from torch import Tensor, nn

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
SEED = 0
# Pixels are noise and do not compress.
FEW = 128
# Archives of the same thing are the same bytes.
NO_TIME = (1980, 1, 1, 0, 0, 0)
README = """\
A vision tower, {part}, {precision}, for {library} {version}.

{files}
  inputs.json          {cases}; every input is a raw little-endian file
  data_loader.py       the same inputs for `polygraphy run --data-loader-script`
  expected.json        */expected.*.bin: outputs of the same program, operator by operator in torch on a CPU,
                       and the limits of the errors
  versions.json        libraries and machine that wrote this

Weights: {weights}.
Calls: {origin}.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproOptions:
    """The block that is kept, or the tower; weights own or random; `lora`: where the adapter is now."""

    block: int = 0
    whole: bool = False
    own_weights: bool = False
    lora: Path | None = None


def write_repro(bundle: Bundle, out: Path, options: ReproOptions, recipe: str | None) -> list[str]:
    """Write the archive; the names in it. The bundle's checkpoint has to be where it was."""
    if out.exists() or not out.absolute().parent.is_dir():
        raise InputError(f"--output {out}: a new file in a folder that exists is expected. Name another one.")
    manifest, backend = bundle.manifest, stored_backend(bundle)
    if not isinstance(backend, WritesStandalone):
        raise _unserved(backend.name)
    from vlexport._build.export import trace

    checkpoint, chosen = checkpoint_of(bundle, lora=options.lora), recipe_of(bundle, recipe)
    spec = TowerSpec(
        recipe=chosen,
        checkpoint=checkpoint,
        config=chosen.read_config(checkpoint, manifest.input_dtype),
        precision=precision_of(manifest),
        form=manifest.attention_form,
        profile=profiles_of(manifest)[0],
    )
    tower, part = _tower(spec, options)
    graph = trace(spec, tower)
    targets: Any = manifest.options.get("targets", ())
    # Next to the archive, so that it comes into its place whole or not at all.
    with ONE_BUILD, tempfile.TemporaryDirectory(dir=out.absolute().parent) as scratch:
        folder = Path(scratch) / "files"
        folder.mkdir()
        calls, origin = _calls(bundle, graph)
        write_cases(calls, folder, trtexec=backend.has_trtexec)
        _write_expected(graph, calls, folder)
        files = backend.write_standalone(
            graph, backend.options(tuple(targets), profiles_of(manifest)), folder
        )
        machine = {"system": platform.platform(), "processor": processor_here(), "device": device_here()}
        versions = {**manifest.versions, "python": platform.python_version(), **machine}
        (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
        readme = README.format(
            part=part,
            precision=manifest.precision.name,
            library=backend.name,
            version=manifest.target.version,
            files=files,
            cases=", ".join(case.name for case in calls),
            weights="the checkpoint's own" if options.own_weights else "random signs, scaled",
            origin=origin,
        )
        (folder / "README.txt").write_text(readme, encoding="utf-8")
        names = _zip(folder, Path(scratch) / "whole.zip")
        (Path(scratch) / "whole.zip").replace(out)
    return names


def _unserved(name: str) -> UnsupportedError:
    able = [backend for backend in backend_names() if isinstance(find_backend(backend), WritesStandalone)]
    return UnsupportedError(
        f"bundle of backend '{name}' given; `repro` supports bundles of: {', '.join(able)}. An engine of "
        f"'{name}' is a program of torch that needs vlexport's operators: nobody could run it without. Build "
        f"the checkpoint with --backend {able[0]} too. If that bundle shows the fault, use it here; "
        "if not, report it with the lines of `vlexport doctor` and of `vlexport check --accuracy -v BUNDLE`."
    )


def _calls(bundle: Bundle, graph: Graph) -> tuple[list[Case], str]:
    stored = report_in(bundle.verdict)
    bad = {row.shapes for row in (stored.rows if stored else ()) if row.verdict == "failed"}
    arguments = (graph.recipe, graph.config, bundle.manifest)
    if failed := list(cases(*arguments, most=1, named=bad)):
        return failed, "failed in the accuracy check of the bundle"
    return list(cases(*arguments, most=2, max_patches=FEW)), "samples of the accuracy check"


def _tower(spec: TowerSpec, options: ReproOptions) -> tuple[nn.Module, str]:
    from torch import nn

    tower: Any = spec.tower()
    part = "whole"
    if not options.whole:
        if not hasattr(tower, "blocks"):
            raise UnsupportedError(
                f"recipe '{spec.recipe.name}' traces a class whole, so no single block of it can be "
                "taken. Pass --whole for all of it."
            )
        depth = len(tower.blocks)
        if not 0 <= options.block < depth:
            raise InputError(
                f"--block {options.block}: the tower has {depth} blocks; 0 to {depth - 1} expected."
            )
        tower.blocks = nn.ModuleList([tower.blocks[options.block]])
        part = f"cut to block {options.block} of {depth}"
    if not options.own_weights:
        _scramble(tower)
    return tower, part


def _scramble(tower: nn.Module) -> None:
    """Replace weights by random signs of the size of random weights, which compress."""
    import torch

    source = torch.Generator().manual_seed(SEED)
    for name, weight in tower.named_parameters():
        if weight.ndim < 2 and not name.endswith("bias"):
            weight.data.fill_(1.0)
            continue
        signs = torch.randint(0, 2, weight.shape, generator=source, dtype=torch.int8) * 2 - 1
        # Not zero for a bias: exporters drop such a sum, and a layer without one cannot become integers.
        weight.data = signs.to(weight.dtype) * (weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.1)


def _write_expected(graph: Graph, calls: list[Case], folder: Path) -> None:
    import torch

    program = graph.program.module()
    with torch.inference_mode():
        outputs = {
            case.name: {
                name: write_raw(rows, folder, f"{case.name}/expected.{name}.bin")
                for name, rows in program(dict(case.inputs)).items()
            }
            for case in calls
        }
    listed = {"limits": _limits(graph), "outputs": outputs}
    (folder / "expected.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def _limits(graph: Graph) -> dict[str, float]:
    scheme = graph.precision.quantisation
    limit = cap_of(scheme) if scheme else graph.recipe.limits.get(graph.dtype)
    factor = MOST_RAISED if scheme else 1.0
    names = ("relative_l2", "worst_token")
    return {name: factor * getattr(limit, name) for name in names} if limit else {}


def _zip(folder: Path, out: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in zip(names, files, strict=True):
            archive.writestr(zipfile.ZipInfo(name, NO_TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return names


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
    calls = list(cases(chosen, config, bundle.manifest))
    if folder.exists():
        raise InputError(f"--output {folder}: exists; a new folder is expected. Name another one.")
    make_folder(folder)
    try:
        write_cases(calls, folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return calls


def profiles_of(manifest: Manifest) -> tuple[ShapeProfile, ...]:
    """Return profiles side by side in the engine, in its order; most engines have one."""
    listed = manifest.options.get("profiles")
    if not isinstance(listed, Mapping) or not listed:
        return (manifest.profile,)
    symbols = {str(symbol): symbol for symbol in manifest.profile.ranges}
    profiles = []
    # A manifest is sorted; the name of the whole keeps the order.
    for name in sorted(listed, key=manifest.profile.name.split("+").index):
        ranges: Any = listed[name]
        profiles.append(
            ShapeProfile(name, {symbols[symbol]: Range(*bounds) for symbol, bounds in ranges.items()})
        )
    return tuple(profiles)


def cases(  # noqa: PLR0913  which of the samples
    recipe: Recipe[Any],
    config: Any,
    manifest: Manifest,
    *,
    most: int = 3,
    max_patches: int = MAX_PATCHES,
    named: Collection[str] | None = None,
) -> Iterator[Case]:
    """Yield samples of the check inside each profile, smallest first; `named`: only the smallest of these."""
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
        fitting = [sample for sample in samples(recipe, config, rules) if isinstance(sample, Sample)]
        if named is not None:
            fitting = [sample for sample in fitting if sample.name in named][:1]
        else:
            # Calls of some cells are as large as others.
            fitting = [sample for sample in fitting if sample.is_whole]
            if not fitting:
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


def write_cases(calls: list[Case], folder: Path, *, trtexec: bool = True) -> None:
    """Write for each case a folder of raw little-endian files, a line for trtexec, a Polygraphy script."""
    listed = []
    for case in calls:
        (folder / case.name).mkdir()
        entries = {
            name: write_raw(tensor, folder, f"{case.name}/{name}.bin") for name, tensor in case.inputs.items()
        }
        if trtexec:
            (folder / case.name / "trtexec.txt").write_text(_flags(case, entries) + "\n", encoding="utf-8")
        listed.append({"name": case.name, "profile": case.profile, "number": case.number, "inputs": entries})
    (folder / LISTING).write_text(json.dumps({"cases": listed}, indent=1) + "\n", encoding="utf-8")
    (folder / LOADER).write_text(LOADER_SOURCE, encoding="utf-8")


def write_raw(tensor: Tensor, folder: Path, file: str) -> dict[str, object]:
    """Write the bytes of a tensor in C order; return what a reader has to know of the file."""
    import torch

    # A single entry keeps its stride through `contiguous`, and then has no view in bytes.
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    (folder / file).write_bytes(whole.view(-1).view(torch.uint8).numpy().tobytes())
    return {"file": file, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _flags(case: Case, entries: Mapping[str, Mapping[str, object]]) -> str:
    shapes = ",".join(f"{name}:{'x'.join(map(str, tensor.shape))}" for name, tensor in case.inputs.items())
    loaded = ",".join(f"{name}:{entry['file']}" for name, entry in entries.items())
    return f"--useProfile={case.number} --shapes={shapes} --loadInputs={loaded}"
