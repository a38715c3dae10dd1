"""transformers' own exporters, as they ship, on a recipe's reference module."""

from __future__ import annotations

import inspect
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.recipe import Reference
from vlexport.specs import MediaItem

INPUTS, OUTPUT = "inputs.safetensors", "output.json"


class Exported:
    """A program that transformers exported, and the field of its result that holds the tokens."""

    def __init__(self, program: Any, field: str) -> None:
        self._program, self._field = program, field

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = getattr(self._program(**inputs), self._field)
        return found

    def save(self, folder: Path, inputs: Mapping[str, Tensor]) -> None:
        """Write the program, the field and the inputs that it was exported with."""
        from safetensors.torch import save_file

        with quiet():
            self._program.save_pretrained(folder)
        save_file({name: value.contiguous() for name, value in inputs.items()}, folder / INPUTS)
        (folder / OUTPUT).write_text(json.dumps(self._field), encoding="utf-8")


def open_exported(folder: Path) -> tuple[Exported, dict[str, Tensor]]:
    """Read back what `Exported.save` wrote."""
    from safetensors.torch import load_file
    from transformers.exporters.base import ExportedModel

    # OpenVINO computes in bfloat16 on its own accord where the processor can.
    target = json.loads((folder / "export.json").read_text(encoding="utf-8"))["export_format"]
    options: dict[str, Any] = {"config": {"INFERENCE_PRECISION_HINT": "f32"}} if target == "openvino" else {}
    with quiet():
        program = ExportedModel.from_pretrained(folder, **options)
    field = json.loads((folder / OUTPUT).read_text(encoding="utf-8"))
    return Exported(program, field), load_file(folder / INPUTS)


def export_reference(
    reference: Reference, items: Sequence[MediaItem], *, target: str = "onnx", dynamic: bool = False
) -> tuple[Exported, dict[str, Tensor]]:
    """Export the reference's module from the very call that serves these items; errors are theirs."""
    from transformers.exporters.auto import get_exporter_class

    inputs, field = inputs_of(reference, items)
    exporter: Any = get_exporter_class(target)
    with quiet():
        program = exporter().export(reference.module, dict(inputs), exporter.config_class(dynamic=dynamic))
    return Exported(program, field), inputs


def inputs_of(reference: Reference, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], str]:
    """Return the inputs of an exported program for these items, and the field of its result that answers.

    The exporters compute sequence boundaries and window order on the host and make them inputs.
    """
    from transformers.exporters.utils import precompute_export_inputs

    given: dict[str, object] = {}
    result: dict[str, object] = {}

    def record(module: nn.Module, args: tuple[object, ...], named: dict[str, object], out: Any) -> None:
        given.update(inspect.signature(module.forward).bind(*args, **named).arguments)
        result.update(out)

    hook = reference.module.register_forward_hook(record, with_kwargs=True)
    try:
        (tokens,) = reference.run(items).values()
    finally:
        hook.remove()
    # Tensors of inference mode cannot be traced.
    inputs: dict[str, object] = {
        name: torch.tensor(value.numpy()) for name, value in given.items() if isinstance(value, Tensor)
    }
    with torch.no_grad():
        precompute_export_inputs(reference.module, inputs)
    field = next(name for name, value in result.items() if value is tokens)
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}, field


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress and the warnings of exporters, which do not concern the result."""
    noisy = [logging.getLogger(name) for name in ("torch", "transformers", "onnxscript")]
    levels = [logger.level for logger in noisy]
    try:
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)
