"""Bugs planted where weights become integers."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _integral(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind="integers", file="onnx/quantize.py", old=old, new=new)


_STORED = "return np.rint(steps_OC).astype(np.int8), scale_O.astype(np.float32)"
_PRODUCT = "return _product(rows, weight, one, scale, middle) * step + bias"

INTEGRAL = (
    _integral(
        "int8: scale of the neighbouring row",
        _STORED,
        "return np.rint(steps_OC).astype(np.int8), np.roll(scale_O, 1).astype(np.float32)",
    ),
    _integral(
        "int8: scale of the whole matrix for every row",
        _STORED,
        "return np.rint(steps_OC).astype(np.int8), np.full_like(scale_O, scale_O.mean())",
    ),
    _integral(
        "int8: cut for rounded",
        _STORED,
        "return np.trunc(steps_OC).astype(np.int8), scale_O.astype(np.float32)",
    ),
    _integral(
        "int8: one step up for every weight",
        _STORED,
        "return np.minimum(np.rint(steps_OC) + 1, 127).astype(np.int8), scale_O.astype(np.float32)",
    ),
    _integral(
        "int8: rounded twice, to half the steps first",
        _STORED,
        "return (2 * np.rint(np.minimum(steps_OC, 126) / 2)).astype(np.int8), scale_O.astype(np.float32)",
    ),
    _integral("int8: the largest weight wraps", "LARGEST: Final = 127", "LARGEST: Final = 128"),
    _integral(
        "int8: zero point off by one",
        "middle = op.Cast(op.Constant(value_int=128), to=2)\n    return _product",
        "middle = op.Cast(op.Constant(value_int=127), to=2)\n    return _product",
    ),
    _integral(
        "int8: layer scaled twice", _PRODUCT, _PRODUCT.replace("* step + bias", "* step * step + bias")
    ),
    _integral(
        "int8: bias in integers", _PRODUCT, _PRODUCT.replace("* step + bias", "* step + op.Round(bias)")
    ),
    _integral("int8: bias lost", _PRODUCT, _PRODUCT.replace("* step + bias", "* step + (bias - bias)")),
    _integral("int8: smallest step 1e-3", "value_float=1e-37", "value_float=1e-3"),
    _integral("int8: smallest step 1e-12", "value_float=1e-37", "value_float=1e-12"),
    _integral(
        "int8: steps of the first row for all",
        "        inputs = [*rounded[given].outputs, integers_CO, scale_O, bias]\n",
        "        inputs = [*next(iter(rounded.values())).outputs, integers_CO, scale_O, bias]\n"
        "        inputs[0] = rounded[given].outputs[0]\n",
    ),
)
