"""A small archive that a library's makers can run with their own tools: a graph, legal inputs, versions."""

from __future__ import annotations

import json
import platform
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.graph import Graph, TowerSpec
from vlexport.backends import Backend, backend_names, find_backend
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, UnsupportedError
from vlexport.inputs import Case, cases, entry, profiles_of, write_cases, write_raw
from vlexport.parity.noise import MOST_RAISED, cap_of
from vlexport.parity.report import report_in
from vlexport.runtime.opening import checkpoint_of, precision_of, recipe_of
from vlexport.target import device_here, processor_here

if TYPE_CHECKING:
    from torch import nn

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
    """The block that is kept, or the whole tower; `own_weights` are those of the checkpoint, else random.

    lora  where the adapter of the build is, if it has moved
    """

    block: int = 0
    whole: bool = False
    own_weights: bool = False
    lora: Path | None = None


def write_repro(
    bundle: Bundle, out: Path, options: ReproOptions | None = None, recipe: str | None = None
) -> list[str]:
    """Write the archive; the names in it. The bundle's checkpoint has to be where it was."""
    if out.exists() or not out.absolute().parent.is_dir():
        raise InputError(f"--output {out}: a new file in a folder that exists is expected. Name another one.")
    options = options or ReproOptions()
    manifest = bundle.manifest
    backend = _vendor(manifest.target.backend)
    checkpoint = checkpoint_of(bundle, lora=options.lora)
    tower, part = _tower(bundle, checkpoint, options, recipe)
    graph = _graph(bundle, checkpoint, tower, recipe)
    targets: Any = manifest.options.get("targets", ())
    # Next to the archive, so that it comes into its place whole or not at all.
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as scratch:
        folder = Path(scratch) / "files"
        folder.mkdir()
        found, origin = _calls(bundle, graph)
        write_cases(found, folder, trtexec=backend.has_trtexec)
        _write_expected(graph, found, folder)
        files = backend.write_standalone(
            graph, backend.options(tuple(targets), profiles_of(manifest)), folder
        )
        machine = {"system": platform.platform(), "processor": processor_here(), "device": device_here()}
        versions = {**manifest.versions, "python": platform.python_version(), **machine}
        (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
        readme = README.format(
            part=part,
            precision=manifest.precision.quantisation or manifest.precision.dtype,
            library=backend.name,
            version=manifest.target.version,
            files=files,
            cases=", ".join(case.name for case in found),
            weights="the checkpoint's own" if options.own_weights else "random signs, scaled",
            origin=origin,
        )
        (folder / "README.txt").write_text(readme, encoding="utf-8")
        names = _zip(folder, Path(scratch) / "whole.zip")
        (Path(scratch) / "whole.zip").replace(out)
    return names


def _vendor(name: str) -> Backend:
    backend = find_backend(name)
    if backend.can_write_standalone:
        return backend
    able = [each for each in backend_names() if find_backend(each).can_write_standalone]
    raise UnsupportedError(
        f"bundle of backend '{name}' given; `repro` supports bundles of: {', '.join(able)}. An engine of "
        f"'{name}' is a program of torch that needs vlexport's operators: nobody could run it without. Build "
        f"the checkpoint with --backend {able[0]} too. If that bundle shows the fault, use it here; "
        "if not, report it with the lines of `vlexport doctor` and of `vlexport parity -v BUNDLE`."
    )


def _calls(bundle: Bundle, graph: Graph) -> tuple[list[Case], str]:
    """Return the smallest call that failed the accuracy check, or two small samples; and which it is."""
    stored = report_in(bundle.verdict)
    bad = {row.shapes for row in (stored.rows if stored else ()) if row.verdict == "failed"}
    given = (graph.recipe, graph.config, bundle.manifest)
    if failed := list(cases(*given, most=1, named=bad)):
        return failed, "failed in the accuracy check of the bundle"
    return list(cases(*given, most=2, max_patches=FEW)), "samples of the accuracy check"


def _tower(
    bundle: Bundle, checkpoint: Checkpoint, options: ReproOptions, recipe: str | None
) -> tuple[nn.Module, str]:
    """Return the tower with one block left, or whole, and which part that is."""
    from torch import nn

    manifest = bundle.manifest
    tower: Any = recipe_of(bundle, recipe).tower(
        checkpoint, manifest.precision.dtype, manifest.precision.fp32_layers, manifest.input_dtype
    )
    part = "whole"
    if not options.whole:
        if not hasattr(tower, "blocks"):
            raise UnsupportedError(
                f"recipe '{manifest.recipe.name}' traces a class whole, so no single block of it can be "
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


def _graph(bundle: Bundle, checkpoint: Checkpoint, tower: nn.Module, recipe: str | None) -> Graph:
    from vlexport._build.export import trace

    manifest, made = bundle.manifest, recipe_of(bundle, recipe)
    spec = TowerSpec(
        recipe=made,
        checkpoint=checkpoint,
        config=made.read_config(checkpoint, manifest.input_dtype),
        precision=precision_of(manifest),
        form=manifest.attention_form,
        profile=profiles_of(manifest)[0],
    )
    return trace(spec, tower)


def _write_expected(graph: Graph, found: list[Case], folder: Path) -> None:
    import torch

    program = graph.program.module()
    outputs: dict[str, dict[str, object]] = {}
    with torch.inference_mode():
        for case in found:
            outputs[case.name] = {}
            for name, rows in program(dict(case.inputs)).items():
                file = f"{case.name}/expected.{name}.bin"
                write_raw(rows, folder / file)
                outputs[case.name][name] = entry(file, rows)
    listed = {"limits": _limits(graph), "outputs": outputs}
    (folder / "expected.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def _limits(graph: Graph) -> dict[str, float]:
    """Return the largest errors that an accuracy check lets pass in this precision."""
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
