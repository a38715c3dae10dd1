"""Run stored calls with a library alone and compare the rows: `python run.py`. Imports no vlexport.

In a bundle it is `python proof/check.py`, which first compares the files with the manifest.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
MANIFEST = HERE.parent / "manifest.json"
# As safetensors and numpy call them; numpy has no bfloat16, of which it reads the bits.
TYPES = {"F32": "float32", "F16": "float16", "BF16": "int16", "U8": "uint8", "I64": "int64", "I32": "int32"}
TYPES |= {"BOOL": "bool", "bfloat16": "int16"}
Arrays = dict[str, Any]


def main() -> int:
    """Return 0 if every call agrees with its stored rows; an error of the library is raised as it is."""
    is_bundle = MANIFEST.is_file()
    if is_bundle and (changed := _changed()):
        sys.stdout.write(f"not as its manifest says: {', '.join(changed)}. Fetch an intact copy.\n")
        return 5
    job = _read("job.json")
    library: Any = importlib.import_module(job["library"])
    place = f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}"
    sys.stdout.write(f"{job['library']} {library.__version__} on {place}\n")
    run = {"onnxruntime": _onnxruntime, "openvino": _openvino}[job["library"]](library, job)
    wrong = count = 0
    for name, inputs, rows, limits in _of_bundle() if is_bundle else _of_archive():
        outputs = run(inputs)
        count += 1
        for output, (stored, dtype) in rows.items():
            agrees, line = _compared(_floats(outputs[output], dtype), stored, limits[output])
            sys.stdout.write(f"{name}: {output} {line}\n")
            wrong += not agrees
    sys.stdout.write(f"{'failed' if wrong else 'passed'}: {count} calls, {wrong} outputs over a limit\n")
    return 3 if wrong and is_bundle else int(wrong > 0)


def _changed() -> list[str]:
    root, files = MANIFEST.parent, json.loads(MANIFEST.read_bytes())["files"]
    raw = hashlib.sha256(MANIFEST.read_bytes()).hexdigest()
    sys.stdout.write(f"bundle {raw}: compare this with the digest that its builder published\n")
    return [name for name, record in files.items() if not _is_same(root / name, record["sha256"])]


def _is_same(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def _of_bundle() -> Iterator[tuple[str, Arrays, Arrays, Any]]:
    manifest, raw = json.loads(MANIFEST.read_bytes()), (HERE / "calls.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    listed, dtypes = json.loads(raw[8:begin]), {spec["name"]: spec["dtype"] for spec in manifest["outputs"]}

    def arrays(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): np.frombuffer(
                bytearray(raw[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]),
                TYPES[entry["dtype"]],
            ).reshape(entry["shape"])
            for name, entry in listed.items()
            if name.startswith(prefix)
        }

    for number, call in enumerate(manifest["proof"]["calls"]):
        rows = {name: (array, dtypes[name]) for name, array in arrays(f"{number}.rows.").items()}
        yield call["name"], arrays(f"{number}.inputs."), rows, call["bounds"]


def _of_archive() -> Iterator[tuple[str, Arrays, Arrays, Any]]:
    expected = _read("expected.json")
    for case in _read("inputs.json")["cases"]:
        inputs = {name: _array(**entry) for name, entry in case["inputs"].items()}
        listed = expected["outputs"][case["name"]]
        rows = {
            name: (_floats(_array(**entry), entry["dtype"]), entry["dtype"]) for name, entry in listed.items()
        }
        yield case["name"], inputs, rows, dict.fromkeys(rows, expected["limits"])


def _onnxruntime(library: Any, job: Any) -> Callable[[Arrays], Arrays]:
    settings = library.SessionOptions()
    for name, value in job["settings"].items():
        setattr(settings, name, value)
    session = library.InferenceSession(_model(job), settings, providers=[job["device"]])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _openvino(library: Any, job: Any) -> Callable[[Arrays], Arrays]:
    core = library.Core()
    model = core.compile_model(core.read_model(_model(job)), job["device"], job["settings"])
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


def _model(job: Any) -> str:
    return str((HERE / job["model"]).resolve())


def _read(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def _array(file: str, dtype: str, shape: list[int]) -> Any:
    return np.frombuffer(bytearray((HERE / file).read_bytes()), TYPES.get(dtype, dtype)).reshape(shape)


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
