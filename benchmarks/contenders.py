"""Who takes part: the reference in three forms, others' exports, ours on each backend, and bare products."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from benchmarks.plans import Plan, Workload
from vlexport.backends import backend_names, find_backend, runs_here

Kind = Literal["eager", "compiled", "exporter", "dense", "ours", "product"]

BASELINE = "Hugging Face eager float32"
TWIN = " (twin)"
LIBRARIES = {"onnx": "onnxruntime", "openvino": "openvino"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One process that gives samples; `library` is a backend, or a format of transformers' exporters."""

    name: str
    kind: Kind
    dtype: str = "float32"
    library: str = ""

    @property
    def engine_name(self) -> str:
        """Twins run the same files."""
        return self.name.removesuffix(TWIN)

    def folder_name(self, workload: Workload) -> str:
        """Where its files lie; exporters' programs hold one shape only."""
        parts = (self.engine_name, *([workload.name] if self.kind == "exporter" else []))
        return "-".join("".join(sign if sign.isalnum() else "-" for sign in part) for part in parts)

    def needs_build(self) -> bool:
        return self.kind not in ("eager", "compiled")

    def refuses(self, plan: Plan, workload: Workload) -> str:
        """Why this workload is not for it; empty if it is."""
        if workload.only_series and self.kind not in ("eager", "ours", "product"):
            return "a step of a growth series"
        if self.kind == "dense" and workload.patches > plan.dense_patches:
            return f"patches x patches masks stop at {plan.dense_patches} patches"
        return ""


def contenders(plan: Plan) -> list[Contender]:
    """Everybody whom this machine can run, the baseline first, yardsticks last."""
    ours = [
        Contender(name=f"{name} {dtype}", kind="ours", dtype=dtype, library=name)
        for name in _usable_backends()
        for dtype in _dtypes(name, plan)
    ]
    halves = sorted({contender.dtype for contender in ours} - {"float32"})
    others = [
        Contender(name=BASELINE, kind="eager"),
        *(Contender(name=f"Hugging Face eager {dtype}", kind="eager", dtype=dtype) for dtype in halves),
        Contender(name="Hugging Face torch.compile", kind="compiled"),
        *(
            Contender(name=f"transformers exporter {form}", kind="exporter", library=form)
            for form in plan.exporters
            if importlib.util.find_spec(LIBRARIES[form]) is not None
        ),
        Contender(name="dense masks in onnxruntime", kind="dense", library="onnxruntime"),
    ]
    twins = [
        Contender(name=one.name + TWIN, kind=one.kind, dtype=one.dtype, library=one.library)
        for one in ours
        if one.name == plan.twin
    ]
    products = [
        Contender(name=f"product in {one.name}", kind="product", dtype=one.dtype, library=one.library)
        for one in ours
    ]
    return [one for one in (*others, *ours, *twins, *products) if one.kind in plan.kinds]


def _usable_backends() -> list[str]:
    return [name for name in backend_names() if runs_here(find_backend(name))]


def _dtypes(backend: str, plan: Plan) -> list[str]:
    able = {each.dtype for each in find_backend(backend).capabilities if each.quantisation is None}
    return [dtype for dtype in plan.dtypes if dtype in able]
