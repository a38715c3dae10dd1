"""Bugs planted in the gate, in stored engines alone, and where only long frames or integers show them."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _far(name: str, lane: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(
        name=f"far: {name}", kind="masks", file=f"vision/{file}.py", old=old, new=new, lanes=(lane,)
    )


FAR = (
    _far(
        "keys beyond 1,024 dropped",
        "eager",
        "attention/kernels",
        "heads_first(q_NHD), heads_first(k_NHD), heads_first(v_NHD), scale=scale",
        "heads_first(q_NHD), heads_first(k_NHD)[:, :, :1024], heads_first(v_NHD)[:, :, :1024], scale=scale",
    ),
    _far(
        "keys beyond 1,024 not seen on shelves",
        "rows",
        "attention/padded",
        "place_FL < self.count_F[:, None]",
        "place_FL < self.count_F[:, None].clamp(max=1024)",
    ),
    _far(
        "positions beyond 512 alike",
        "eager",
        "rotary",
        "positions_N2.float()[:, :, None]",
        "positions_N2.clamp(max=511).float()[:, :, None]",
    ),
)


def _gate(name: str, lane: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"gate: {name}", kind="gate", file=f"{file}.py", old=old, new=new, lanes=(lane,))


GATE = (
    _gate(
        "an engine that was never run is handed out",
        "identity",
        "_build",
        "backend.cannot_run(target) is not None)",
        "backend is not None)",
    ),
    _gate(
        "a blocked check is good enough",
        "identity",
        "_build",
        'return status == "passed" or (',
        'return status in ("passed", "blocked") or (',
    ),
    _gate(
        "nothing compared has passed",
        "gate",
        "parity/report",
        '        if "blocked" in verdicts:\n            return "blocked"',
        '        if "blocked" in verdicts:\n            return "passed"',
    ),
    _gate(
        "the tower in torch answers for the engine",
        "eager",
        "parity/check",
        "outputs, error = _run(self.engine, cast_floats(inputs, self.subject.dtype))",
        'outputs, error = self.subject.tower()(cast_floats(inputs, self.subject.dtype)), ""',
    ),
    _gate(
        "errors of whole calls are zero",
        "eager",
        "parity/metrics",
        "relative_l2=_ratio(float(error_T.norm()), total),",
        "relative_l2=0.0,",
    ),
    _gate(
        "errors of tokens are zero",
        "eager",
        "parity/metrics",
        "worst_token=_largest(token_T),",
        "worst_token=0.0,",
    ),
    _gate(
        "constant pixels in every sample",
        "eager",
        "parity/samples",
        "return slope + torch.randn(rows, width, generator=generator)",
        "return torch.full_like(slope + torch.randn(rows, width, generator=generator), 0.5)",
    ),
    _gate(
        "tables that nothing checks are not named",
        "gate",
        "parity/integers",
        "if not _is_touched(name, touched)",
        'if not name and name not in ("",)',
    ),
    _gate(
        "tables named like shelves count as checked",
        "gate",
        "parity/integers",
        'shelf is not None and f"{shelf[1]}_cells" in touched',
        "shelf is not None",
    ),
    _gate(
        "widened limits without a check of blocks",
        "gate",
        "parity/check",
        "if not self.truths.blocks and limit is not None and any(",
        "if self.truths.blocks and limit is not None and any(",
    ),
    _gate(
        "any block is right",
        "gate",
        "parity/numerics",
        "BLOCK_LIMIT = Limit(\n    relative_l2=1e-5,\n    worst_token=5e-5,",
        "BLOCK_LIMIT = Limit(\n    relative_l2=1e-1,\n    worst_token=5e-1,",
    ),
)


def _stored(name: str, lane: str, old: str, new: str, trial: str = "windows") -> Mutant:
    file = f"backends/{lane}.py"
    return Mutant(
        name=f"stored: {name}", kind="stored", file=file, old=old, new=new, trial=trial, lanes=(lane,)
    )


_ONNX = "        onnx_ir.save(model, out / MODEL, external_data=WEIGHTS, size_threshold_bytes=1024)\n"
_OPENVINO = "            library.save_model(read, out / MODEL, compress_to_fp16=False)\n"
STORED = (
    _stored(
        "epsilon of block 7 in the ONNX file",
        "onnxruntime",
        _ONNX,
        "        norms = [node for node in model.graph if 'epsilon' in node.attributes]\n"
        "        norms[14].attributes['epsilon'] = onnx_ir.AttrFloat32('epsilon', 1e-5)\n" + _ONNX,
        "deep",
    ),
    _stored(
        "epsilon of block 7 in the OpenVINO file",
        "openvino",
        _OPENVINO,
        "            ops = read.get_ordered_ops()\n"
        "            norms = [each for each in ops if each.get_type_name() == 'Add'\n"
        "                     and each.input_value(0).get_node().get_type_name() == 'ReduceMean']\n"
        "            norms[14].input(1).replace_source_output(\n"
        "                library.opset13.constant([1e-5], library.Type.f32).output(0))\n" + _OPENVINO,
        "deep",
    ),
    _stored(
        "one bit of one weight in the ONNX file",
        "onnxruntime",
        _ONNX,
        _ONNX + "        content = bytearray((out / WEIGHTS).read_bytes())\n"
        "        content[len(content) // 8 * 4] ^= 1\n"
        "        (out / WEIGHTS).write_bytes(content)\n",
    ),
    _stored(
        "one bit of one weight in the OpenVINO file",
        "openvino",
        _OPENVINO,
        _OPENVINO + "            content = bytearray((out / WEIGHTS).read_bytes())\n"
        "            content[len(content) // 8 * 4] ^= 1\n"
        "            (out / WEIGHTS).write_bytes(content)\n",
    ),
)


def _tables(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"tables: {name}", kind="masks", file=file, old=old, new=new, lanes=("openvino",))


TABLES = (
    _tables(
        "two windows of a row share a number",
        "vision/attention/padded.py",
        "number_S[place_M] = torch.repeat_interleave(torch.arange(len(lengths)), segments.lengths_S)",
        "number_S[place_M] = torch.repeat_interleave(torch.arange(len(lengths)) // 2, segments.lengths_S)",
    ),
)


def _integers(name: str, old: str, new: str) -> Mutant:
    return Mutant(
        name=f"int8: {name}", kind="integers", file="onnx/quantize.py", old=old, new=new, lanes=("int8",)
    )


EIGHT = (
    _integers(
        "smallest step of a row 1/1000", "op.Constant(value_float=1e-37)", "op.Constant(value_float=1e-3)"
    ),
    _integers(
        "one scale for a whole matrix",
        "scale_O = np.abs(weight_OC).max(axis=1) / np.float32(LARGEST)",
        "scale_O = np.full(len(weight_OC), np.abs(weight_OC).max(), np.float32) / np.float32(LARGEST)",
    ),
    _integers(
        "scales in half precision",
        "np.rint(steps_OC).astype(np.int8), scale_O.astype(np.float32)",
        "np.rint(steps_OC).astype(np.int8), scale_O.astype(np.float16).astype(np.float32)",
    ),
)

SHIPPED = (*FAR, *GATE, *STORED, *TABLES, *EIGHT)
