"""TorchInductor: an AOTInductor package that runs where no compiler is, its weights in a file next to it.

Attention stays the eager operator: torch's own kernel, called once per run of equal segments.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends import _torch, base
from vlexport.errors import UnsupportedError
from vlexport.estimate import Costs
from vlexport.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.graph import Graph

PACKAGE = "program.pt2"
WEIGHTS = "program.safetensors"

# Instructions of gcc and clang at each level, as torch.cpu.get_capabilities names them.
LEVELS = {
    "x86-64-v4": ("avx2", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_f", "avx512_vl", "bmi2", "f16c"),
    "x86-64-v3": ("avx2", "bmi2", "f16c", "fma3"),
}


class Inductor(base.Backend):
    """Compiled for this processor's level and this torch; both are in the target."""

    name = "inductor"
    summary = "AOTInductor package: fused C++ loops, loadable without a compiler"
    form = "grouped"
    capabilities = (
        base.Capability(
            dtype="float32",
            note="building needs a C++ compiler, running does not",
            costs=Costs(
                base=314, opening=0.92, weights=1.04, values=1.12, disk=1.9,
                build_base=200, build_weights=4.53, check_values=3.18, compile_base=497, compile_weights=4.6,
            ),
        ),
        base.Capability(
            dtype="bfloat16",
            note="norm statistics, rotary and softmax in float32",
            costs=Costs(
                base=324, opening=1.0, weights=1.01, values=1.48, disk=2.0,
                build_base=200, build_weights=3.96, check_values=3.19, compile_base=527, compile_weights=3.86,
            ),
        ),
    )  # fmt: skip

    def target(self) -> Target:
        level, here = _level(), super().target()
        features = "+".join(LEVELS[level]) if level else None
        return replace(here, instruction_set=features, torch=here.version)

    def build(
        self, graph: Graph, options: base.Options, out: Path, progress: base.Progress = base.log_progress
    ) -> None:
        from torch._inductor import aoti_compile_and_package

        if compiler() is None:
            raise UnsupportedError(
                "backend 'inductor' builds with a C++ compiler and found none: set CXX or install g++. "
                "A bundle that another machine built runs here without one."
            )
        program = graph.program
        with warnings.catch_warnings():
            # torch's own use of its tree library.
            warnings.simplefilter("ignore", FutureWarning)
            aoti_compile_and_package(program, package_path=str(out / PACKAGE), inductor_configs=_settings())
        _torch.write_weights(out / WEIGHTS, {**program.state_dict, **_constants(graph)})

    def open(self, payloads: base.Payloads, spec: base.EngineSpec, options: base.Options) -> base.Runner:
        import torch

        content, stored = payloads.read(PACKAGE), payloads.read(WEIGHTS)
        with base.refused_by(f"torch {torch.__version__}"):
            package = _package(content)
            weights = _torch.read_weights(stored)
            wanted = {name: weights[name] for name in package.get_constant_fqns()}
            package.load_constants(wanted, check_full_update=True, user_managed=True)
        return _PackageRunner(package, wanted, options.threads)

    def inside(self, payloads: base.Payloads) -> base.Inside:
        weights = _torch.read_weights(payloads.read(WEIGHTS))
        opened = functools.cache(lambda: _package(payloads.read(PACKAGE)))

        def partly(inputs: Mapping[str, Tensor], off: Callable[[str], bool]) -> Mapping[str, Tensor]:
            """Run the compiled package with some of its weights at zero."""
            import torch

            package = opened()
            names = package.get_constant_fqns()
            given = {name: weights[name] * 0 if off(name) else weights[name] for name in names}
            package.load_constants(given, check_full_update=True, user_managed=True)
            with torch.inference_mode():
                return {name: each.clone() for name, each in package(dict(inputs)).items()}

        return base.Inside(weights=weights, partly=partly)


def _package(content: bytes) -> Any:
    from torch._inductor import aoti_load_package

    import vlexport.vision.attention.kernels  # noqa: F401  defines the attention operator that packages call

    return aoti_load_package(io.BytesIO(content))


def compiler() -> str | None:
    """Return the C++ compiler that torch would call, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _level() -> str | None:
    """Return the highest level that this processor has; None where processors have no such levels."""
    import torch

    has = torch.cpu.get_capabilities()
    return next((level for level, needs in LEVELS.items() if all(has.get(need) for need in needs)), None)


def _settings() -> dict[str, str | int | bool | Callable[..., object]]:
    """Return settings: constants outside the shared object, the number of threads chosen at every call.

    Headers are not compiled beforehand: torch keeps those, 0.3 GB for each build, in the shared temporary
    folder for good, whatever cache folder is set.
    """
    settings: dict[str, str | int | bool | Callable[..., object]] = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": False,
        "cpp.dynamic_threads": True,
    }
    level = _level()
    if level is not None:
        settings |= {"cpp.march": level, "cpp.simdlen": 512 if level == "x86-64-v4" else 256}
    return settings


def _constants(graph: Graph) -> dict[str, Tensor]:
    """Return tensors that the trace found outside the state."""
    import torch

    return {name: value for name, value in graph.program.constants.items() if isinstance(value, torch.Tensor)}


class _PackageRunner(_torch.TorchRunner):
    def __init__(
        self,
        function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        weights: Mapping[str, Tensor],
        threads: int,
    ) -> None:
        super().__init__(function, threads)
        # The package reads them in place, so they live as long as it does.
        self.weights = weights

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().run({name: tensor.contiguous() for name, tensor in tensors.items()})


BACKEND = Inductor()
