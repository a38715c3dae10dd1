"""Build model.onnx with the library alone, as job.json describes: `python build.py`. Imports no vlexport."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Return 0 with engine.trt written, 1 with the library's reasons printed."""
    here = Path(__file__).resolve().parent
    job = json.loads((here / "job.json").read_text(encoding="utf-8"))
    library: Any = importlib.import_module(job["library"])
    sys.stdout.write(f"{job['library']} {library.__version__}\n")
    logger = library.Logger(library.Logger.WARNING)
    builder = library.Builder(logger)
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(here / "model.onnx")):
        for index in range(parser.num_errors):
            sys.stdout.write(f"{parser.get_error(index)}\n")
        return 1
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "ATTENTION_OUTPUT":
            layer.__class__ = library.IAttentionOutputLayer
            # There are no fused kernels for float32.
            layer.attention.decomposable = layer.attention.get_input(0).dtype == library.float32
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)
    for inputs in job["profiles"].values():
        profile = builder.create_optimization_profile()
        for name, bounds in inputs.items():
            profile.set_shape(name, *map(tuple, bounds))
        config.add_optimization_profile(profile)
    capabilities = getattr(library, "ComputeCapability", None)
    if capabilities is not None:
        config.num_compute_capabilities = len(job["targets"])
        for index, target in enumerate(job["targets"]):
            config.set_compute_capability(getattr(capabilities, target.upper()), index)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return 1
    (here / "engine.trt").write_bytes(engine)
    sys.stdout.write(f"{network.num_layers} layers, engine.trt has {engine.nbytes} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
