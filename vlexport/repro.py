"""A small archive that a library's makers can run with their own tools: one block, legal inputs, versions."""

from __future__ import annotations

import json
import platform
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends import Backend, backend_names, find_backend
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, UnsupportedError
from vlexport.graph import Graph, TowerSpec
from vlexport.inputs import Case, cases, profiles_of, write_cases, write_raw
from vlexport.runtime.opening import checkpoint_of, recipe_of
from vlexport.specs import Precision

if TYPE_CHECKING:
    from torch import nn

SEED = 0
# Pixels are noise and do not compress.
FEW = 128
# Archives of the same thing are the same bytes.
NO_TIME = (1980, 1, 1, 0, 0, 0)
README = """\
A vision tower cut to block {block} of {depth}, {dtype}, for {library} {version}.

  python build.py      parses model.onnx and builds engine.trt with {library} alone; prints its messages
  inputs.json          {cases}; every input is a raw little-endian file
  */trtexec.txt        flags of trtexec for that case
  data_loader.py       polygraphy run model.onnx --data-loader-script data_loader.py ...
  */expected.*.bin     outputs of the same program, operator by operator in torch on a CPU
  job.json             targets, profiles, dtypes that the parsed network should have
  versions.json        what wrote this

Weights: {weights}.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproOptions:
    """The block that is kept; `own_weights` puts those of the checkpoint into the archive.

    lora  where the adapter of the build is, if it has moved
    """

    block: int = 0
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
    tower, depth = _tower(bundle, checkpoint, options, recipe)
    graph = _graph(bundle, checkpoint, tower, recipe)
    targets: Any = manifest.options.get("targets", ())
    # Next to the archive, so that it comes into its place whole or not at all.
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as scratch:
        folder = Path(scratch) / "files"
        folder.mkdir()
        found = list(cases(graph.recipe, graph.config, manifest, most=2, max_patches=FEW))
        write_cases(found, folder)
        _write_expected(graph, found, folder)
        backend.write_standalone(graph, backend.options(tuple(targets), profiles_of(manifest)), folder)
        versions = {**manifest.versions, "python": platform.python_version(), "system": platform.platform()}
        (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
        readme = README.format(
            block=options.block,
            depth=depth,
            dtype=manifest.precision.dtype,
            library=backend.name,
            version=manifest.target.version,
            cases=", ".join(case.name for case in found),
            weights="the checkpoint's own" if options.own_weights else "random signs, scaled",
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
        f"bundle of backend '{name}' given; `repro` supports bundles of: {', '.join(able)}. Build one with "
        f"--backend {able[-1]}, or write inputs alone with `vlexport export-inputs`."
    )


def _tower(
    bundle: Bundle, checkpoint: Checkpoint, options: ReproOptions, recipe: str | None
) -> tuple[nn.Module, int]:
    """Return the tower with one block left, and how many it had."""
    from torch import nn

    manifest = bundle.manifest
    tower: Any = recipe_of(bundle, recipe).tower(
        checkpoint, manifest.precision.dtype, manifest.precision.fp32_layers, manifest.input_dtype
    )
    if not hasattr(tower, "blocks"):
        raise UnsupportedError(
            f"recipe '{manifest.recipe.name}' traces a class whole, so no single block of it can be taken. "
            "`vlexport export-inputs` writes inputs for the whole engine."
        )
    depth = len(tower.blocks)
    if not 0 <= options.block < depth:
        raise InputError(f"--block {options.block}: the tower has {depth} blocks; 0 to {depth - 1} expected.")
    tower.blocks = nn.ModuleList([tower.blocks[options.block]])
    if not options.own_weights:
        _scramble(tower)
    return tower, depth


def _scramble(tower: nn.Module) -> None:
    """Replace weights by random signs of the size of random weights, which compress."""
    import torch

    source = torch.Generator().manual_seed(SEED)
    for name, weight in tower.named_parameters():
        if weight.ndim < 2:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        signs = torch.randint(0, 2, weight.shape, generator=source, dtype=torch.int8) * 2 - 1
        weight.data = signs.to(weight.dtype) * weight[0].numel() ** -0.5


def _graph(bundle: Bundle, checkpoint: Checkpoint, tower: nn.Module, recipe: str | None) -> Graph:
    from vlexport._export import trace

    manifest, made = bundle.manifest, recipe_of(bundle, recipe)
    spec = TowerSpec(
        recipe=made,
        checkpoint=checkpoint,
        config=made.read_config(checkpoint, manifest.input_dtype),
        precision=Precision(dtype=manifest.precision.dtype, fp32_layers=manifest.precision.fp32_layers),
        form=manifest.attention_form,
        profile=profiles_of(manifest)[0],
    )
    return trace(spec, tower)


def _write_expected(graph: Graph, found: list[Case], folder: Path) -> None:
    import torch

    program = graph.program.module()
    with torch.inference_mode():
        for case in found:
            for name, rows in program(dict(case.inputs)).items():
                write_raw(rows, folder / case.name / f"expected.{name}.bin")


def _zip(folder: Path, out: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in zip(names, files, strict=True):
            archive.writestr(zipfile.ZipInfo(name, NO_TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return names
