"""int8: smaller files, integers where they were promised, no more noise than the same integers cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import onnx_ir as ir
import pytest
import torch

from tests.cli.lines import vlexport
from tests.golden_towers import sharp_weights, write_recorded_tower
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.backends import find_backend, require
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError, UnsupportedError
from vlexport.parity.check import check
from vlexport.parity.report import ParityReport
from vlexport.runtime.pipeline import load

INSTRUCTIONS = set(re.findall("avx512_vnni|avx_vnni|avx512_bf16", Path("/proc/cpuinfo").read_text()))
HAS_BFLOAT16, HAS_VNNI = "avx512_bf16" in INSTRUCTIONS, bool(INSTRUCTIONS - {"avx512_bf16"})
WEIGHTS = {"onnxruntime": "model.weights", "openvino": "model.bin", "inductor": "program.safetensors"}
BACKENDS = [
    "onnxruntime",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(not HAS_VNNI, reason="the processor has no VNNI, inductor no int8"),
    ),
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(
            find_backend("openvino").missing() is not None,
            reason="openvino is not installed: pip install 'vlexport[openvino]'",
        ),
    ),
]


def write(source: str, folder: Path) -> Path:
    if source == "golden":
        return write_recorded_tower(folder, 0)
    if source == "sharp":
        return write_recorded_tower(folder, 0, sharp_weights(0, seed=1))
    return write_tiny_minicpmv(folder, Tiny(version=source))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Bundle]:
    """Bundles of one tower: in integers and not, by backend."""
    folder = tmp_path_factory.mktemp("int8")
    source = Checkpoint.open(write("sharp", folder / "checkpoint"))
    return {
        (backend, quantize or "float32"): build_checkpoint(
            request(source, backend=backend, quantize=quantize, output_dir=folder / "engines")
        ).bundle
        for backend in ("onnxruntime", "openvino", "inductor")
        if find_backend(backend).missing() is None
        for quantize in (None, "int8")
        if quantize is None or backend != "inductor" or HAS_VNNI
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["golden", "2.0", "4.5"])
def test_towers_of_every_family_pass_both_verdicts(backend: str, source: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(source, tmp_path / "checkpoint"))
    spec = request(checkpoint, backend=backend, quantize="int8", output_dir=tmp_path)
    report = ParityReport.from_json(build_checkpoint(spec).require_passed().manifest.parity.table)
    kinds = {row.level for row in report.rows if row.verdict == "passed"}
    assert kinds == {"L0", "L1", "L2", "L3"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_export_and_precision_have_a_verdict_each(backend: str, built: dict[tuple[str, str], Bundle]) -> None:
    manifest = built[backend, "int8"].manifest
    rows = ParityReport.from_json(manifest.parity.table).rows
    export = [row for row in rows if row.level == "L2"]
    precision = [row for row in rows if row.level == "L3" and row.limits.get("relative_l2")]
    assert {tuple(row.limits.values()) for row in export} == {(1.5, 3.0)}
    limits = {tuple(row.limits.values()) for row in precision}
    # In bfloat16 the reference of this tower loses more than the cap by itself.
    assert limits == {(0.13, 0.30)} or (backend == "inductor" and max(limits) <= (1.25 * 0.13, 1.25 * 0.30))
    assert all("SQNR" in row.note and row.metrics["sqnr"] > 17 for row in precision)
    # Emulated layer by layer, the reference loses just what the kernels lose; 1.01 measured, and 0.83 where
    # the kernels take groups of fewer columns in layers as small as these. With attention in bfloat16 single
    # calls lose up to 1.16, and 1.34 where values are cut to it.
    narrow = backend == "openvino" and HAS_BFLOAT16
    ratios = [row.metrics["ratio"] for row in export]
    assert max(ratios) < (1.2 if narrow else 1.1)
    assert median(ratios) < 1.1
    (weights,) = [row.note for row in rows if row.check == "engine weights"]
    assert "; int8: blocks.*.attn.proj, blocks.*.attn.qkv, blocks.*.mlp.down_proj, " in weights
    rest = "; bfloat16: merger.mlp.0, merger.mlp.2; attention in bfloat16, the rest float32"
    if backend == "inductor":
        assert weights.endswith("; attention in bfloat16, the rest bfloat16")
    else:
        assert weights.endswith(rest if narrow else "; attention in float32, the rest float32")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_another_smaller_bundle_named_so(backend: str, built: dict[tuple[str, str], Bundle]) -> None:
    exact, rounded = built[backend, "float32"], built[backend, "int8"]
    assert (exact.manifest.precision.quantisation, rounded.manifest.precision.quantisation) == (None, "int8")
    assert exact.manifest.key != rounded.manifest.key
    assert "-int8-" in rounded.path.name
    weights = [each.manifest.files[WEIGHTS[backend]].size for each in (rounded, exact)]
    assert weights[0] < 0.6 * weights[1]
    assert "--quantize int8" in rounded.rebuild_command()
    found = json.loads("".join(vlexport("inspect", rounded.path, "--json").lines))
    dtype = "bfloat16" if backend == "inductor" else "float32"
    assert found["precision"] == {"dtype": dtype, "fp32_layers": {}, "quantisation": "int8"}


@pytest.mark.slow
def test_onnxruntime_multiplies_integers_in_every_layer_of_the_blocks(built):
    model = ir.load(built["onnxruntime", "int8"].path / "model.onnx")
    counts = Counter(node.op_type for node in model.graph)
    assert (counts["IntegerLinear"], counts["Gemm"]) == (20, 3)
    stored = Counter(str(each.dtype) for each in model.graph.initializers.values())
    assert stored["INT8" if HAS_VNNI else "UINT8"] == 20


@pytest.mark.slow
def test_openvino_runs_integers_in_every_layer_of_the_blocks(built: dict[tuple[str, str], Bundle]) -> None:
    library = pytest.importorskip("openvino")
    path = built["openvino", "int8"].path
    compiled = library.Core().compile_model(path / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    run = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    types = Counter(
        info["runtimePrecision"].astype(str)
        for info in run
        if info["layerType"].astype(str) == "FullyConnected"
    )
    # Patch embedding, and two of the merger.
    assert types == ({"i8": 20, "f32": 1, "bf16": 2} if HAS_BFLOAT16 else {"i8": 20, "f32": 3})


@pytest.mark.slow
def test_a_stored_bundle_is_checked_again_with_its_own_rounding(built):
    report = check(built["onnxruntime", "int8"], layers=True)
    assert report.passed
    assert report.layers is not None
    assert report.layers.first_bad is None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VNNI, reason="the processor has no VNNI")
def test_signed_weights_are_for_processors_that_sum_them_exactly(built, tmp_path, monkeypatch) -> None:
    bundle = built["onnxruntime", "int8"]
    targets = {built["onnxruntime", kind].manifest.target.instruction_set for kind in ("float32", "int8")}
    assert targets == {None, "vnni"}
    checkpoint = Checkpoint.open(bundle.path.parents[1] / "checkpoint")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(MisfitError, match="instruction set is vnni in the bundle and unknown here"):
        load(bundle)
    spec = request(checkpoint, backend="onnxruntime", quantize="int8", output_dir=tmp_path)
    elsewhere = build_checkpoint(spec).bundle
    assert elsewhere.manifest.target.instruction_set is None
    kinds = {str(each.dtype) for each in ir.load(elsewhere.path / "model.onnx").graph.initializers.values()}
    assert "UINT8" in kinds
    assert "INT8" not in kinds


@pytest.mark.parametrize(
    ("backend", "dtype", "words"),
    [
        (
            "eager",
            "float32",
            "'eager' does not serve float32 with weights in int8. It serves: bfloat16, float32",
        ),
        ("onnxruntime", "bfloat16", "bfloat16 with weights in int8 is served by: inductor."),
        ("inductor", "float32", "'inductor' does not serve float32 with weights in int8"),
    ],
)
def test_who_does_not_serve_it_names_who_does(backend: str, dtype: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        require(find_backend(backend), dtype, "int8")


@pytest.mark.slow
def test_the_command_line_builds_plans_and_lists_it(tmp_path: Path) -> None:
    checkpoint = write("2.6", tmp_path / "checkpoint")
    words = (checkpoint, "--quantize", "int8", "--output-dir", tmp_path)
    planned = vlexport("plan", *words, "--json").document
    ran = vlexport("build", *words)
    assert (ran.code, ran.lines[-1]) == (0, planned["path"])
    size = sum(file.size for file in Bundle.open(ran.lines[-1]).manifest.files.values())
    assert abs(planned["disk_bytes"] / size - 1) < 0.3
    assert vlexport("plan", *words, "--json").document["cached"]
    listed = vlexport("doctor", "--json").document["backends"]
    assert {each["name"] for each in listed if each["quantise"]} == {"onnxruntime", "openvino", "inductor"}
    assert vlexport("build", checkpoint, "--quantize", "int3", "--output-dir", tmp_path).code == 2
