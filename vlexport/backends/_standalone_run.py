"""Run a stored call with the library alone and compare its outputs: `python run.py`. Imports no vlexport."""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
Arrays = dict[str, Any]


def main() -> int:
    """Return 0 if every call agrees with its stored outputs; an error of the library is raised as it is."""
    job, expected = _read("job.json"), _read("expected.json")
    library: Any = importlib.import_module(job["library"])
    place = f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}"
    sys.stdout.write(f"{job['library']} {library.__version__} on {place}\n")
    run = {"onnxruntime": _onnxruntime, "openvino": _openvino}[job["library"]](library, job)
    wrong = 0
    for case in _read("inputs.json")["cases"]:
        outputs = run({name: _array(**entry) for name, entry in case["inputs"].items()})
        for name, entry in expected["outputs"][case["name"]].items():
            actual, stored = (_floats(array, entry["dtype"]) for array in (outputs[name], _array(**entry)))
            agrees, line = _compared(actual, stored, expected["limits"])
            sys.stdout.write(f"{case['name']}: {name} {line}\n")
            wrong += not agrees
    return int(wrong > 0)


def _onnxruntime(library: Any, job: Any) -> Callable[[Arrays], Arrays]:
    settings = library.SessionOptions()
    for name, value in job["settings"].items():
        setattr(settings, name, value)
    session = library.InferenceSession(str(HERE / job["model"]), settings, providers=[job["device"]])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _openvino(library: Any, job: Any) -> Callable[[Arrays], Arrays]:
    core = library.Core()
    model = core.compile_model(core.read_model(HERE / job["model"]), job["device"], job["settings"])
    names = [port.get_any_name() for port in model.outputs]
    narrow = {port.get_any_name() for port in model.inputs if port.element_type == library.Type.bf16}

    def run(inputs: Arrays) -> Arrays:
        typed = {
            name: library.Tensor(inputs[name], library.Shape(inputs[name].shape), library.Type.bf16)
            for name in narrow
        }
        results = model.create_infer_request().infer({**inputs, **typed})
        return {name: results[name] for name in names}

    return run


def _read(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def _array(file: str, dtype: str, shape: list[int]) -> Any:
    kind = "int16" if dtype == "bfloat16" else dtype
    return np.frombuffer(bytearray((HERE / file).read_bytes()), dtype=kind).reshape(shape)


def _floats(array: Any, dtype: str) -> Any:
    return (array.view("uint16").astype("uint32") << 16).view("float32") if dtype == "bfloat16" else array


def _compared(actual: Any, stored: Any, limits: dict[str, float]) -> tuple[bool, str]:
    if actual.shape != stored.shape:
        return False, f"shape {list(actual.shape)}, {list(stored.shape)} expected: differs"
    error, size = actual.astype("float64") - stored, stored.astype("float64")
    rows = np.linalg.norm(error, axis=-1) / np.linalg.norm(size, axis=-1)
    errors = {"relative_l2": np.linalg.norm(error) / np.linalg.norm(size), "worst_token": rows.max()}
    agrees = all(errors[name] <= limit for name, limit in limits.items())
    bounds = {name: f" of {limit:.2g}" for name, limit in limits.items()}
    words = ", ".join(f"{name} {value:.2g}{bounds.get(name, '')}" for name, value in errors.items())
    return (
        agrees,
        f"{list(actual.shape)}: {words} (row {int(rows.argmax())}): {'ok' if agrees else 'differs'}",
    )


if __name__ == "__main__":
    sys.exit(main())
