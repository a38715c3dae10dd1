"""Bugs planted on the way to ONNX, and in what a bundle is called, holds and refuses."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _lowering(name: str, kind: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file=f"onnx/{file}.py", old=old, new=new)


_LOOP = """        value = op.Reshape(op.Slice(v, start, stop), shape)
        mixed = _multi_head_attention(query, key, value, num_heads=num_heads, scale=scale)
        parts = op.SequenceInsert(parts, op.Reshape(mixed, rows))
        start = op.Identity(stop)
    return op.ConcatFromSequence(parts, axis=0)


@script(_ours, default_opset=op)
def cross_portable("""

LOWERING = (
    _lowering(
        "fused norm with a larger epsilon",
        "arithmetic",
        "fusions",
        "epsilon=_scalar(eps), stash_type=1",
        "epsilon=10.0 * _scalar(eps), stash_type=1",
    ),
    _lowering(
        "fused norm without its weight",
        "arithmetic",
        "fusions",
        "op.SimplifiedLayerNormalization(x, weight,",
        "op.SimplifiedLayerNormalization(x, op.Div(weight, weight),",
    ),
    _lowering(
        "fused gate of another sigmoid",
        "arithmetic",
        "fusions",
        "op.QuickGelu(gate, alpha=1.0",
        "op.QuickGelu(gate, alpha=1.702",
    ),
    _lowering(
        "fused gate and up exchanged",
        "arithmetic",
        "fusions",
        "op.Mul(op.QuickGelu(gate, alpha=1.0, _domain=attention.CONTRIB, _version=1), up)",
        "op.Mul(op.QuickGelu(up, alpha=1.0, _domain=attention.CONTRIB, _version=1), gate)",
    ),
    _lowering(
        "fused rotary with neighbours as pairs", "positions", "fusions", "interleaved=0", "interleaved=1"
    ),
    _lowering(
        "fused rotary with sine and cosine exchanged",
        "positions",
        "fusions",
        "cos.producer().inputs[0],\n            sin.producer().inputs[0],",
        "sin.producer().inputs[0],\n            cos.producer().inputs[0],",
    ),
    _lowering(
        "kernel without the values",
        "arithmetic",
        "attention",
        _LOOP,
        _LOOP.replace("(query, key, value,", "(query, key, key,"),
    ),
    _lowering(
        "kernel asks with the keys",
        "arithmetic",
        "attention",
        _LOOP,
        _LOOP.replace("(query, key, value,", "(key, key, value,"),
    ),
    _lowering(
        "kernel stays at the first run",
        "masks",
        "attention",
        _LOOP,
        _LOOP.replace("op.Identity(stop)", "op.Identity(start)"),
    ),
)


def _identity(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind="identity", file=file, old=old, new=new)


IDENTITY = (
    _identity(
        "cache key without dtype",
        "_build.py",
        "        dtype=asked.dtype,\n        islands",
        '        dtype="float32",\n        islands',
    ),
    _identity(
        "cache key without the weights",
        "_build.py",
        "weights_digest=asked.checkpoint.digest(weights),",
        'weights_digest="0" * 64,',
    ),
    _identity(
        "cache key without the settings",
        "_build.py",
        "        preprocessing=encode(config),",
        "        preprocessing={},",
    ),
    _identity(
        "cache key without the recipe's text",
        "_build.py",
        "recipe_digest=asked.recipe.digest,",
        'recipe_digest="0" * 64,',
    ),
    _identity(
        "cache key without the ranges of the profile",
        "bundle/key.py",
        "    content = encode(build)\n",
        '    content = {**encode(build), "profile": build.profile.name}\n',
    ),
    _identity(
        "cache key without the target",
        "bundle/key.py",
        "    content = encode(build)\n",
        '    content = {**encode(build), "target": ""}\n',
    ),
    _identity(
        "digest of names without bytes",
        "checkpoint/safetensors.py",
        "                content.update(part)\n",
        "",
    ),
    _identity(
        "profile swapped in the manifest",
        "codec.py",
        "lambda r: [r.min, r.opt, r.max]",
        "lambda r: [r.min, r.opt, r.opt]",
    ),
    _identity(
        "profile not enforced", "specs.py", "        if value not in known:", "        if value < known.min:"
    ),
    _identity(
        "weights read as the next tensor",
        "checkpoint/safetensors.py",
        "reader.fill(stored, 0, flat.view(torch.uint8).numpy().data)",
        "reader.fill(stored, 0, flat.view(torch.uint8).numpy().data); flat.copy_(flat.flip(0))",
    ),
    _identity(
        "weights kept in half precision",
        "checkpoint/safetensors.py",
        "flat.view(torch.uint8).numpy().data)\n        return tensor",
        "flat.view(torch.uint8).numpy().data)\n        return tensor.half().to(tensor.dtype)",
    ),
    _identity(
        "failed verdict not honoured",
        "runtime/opening.py",
        'bundle.verdict.status != "passed"',
        'bundle.verdict.status == "not_run"',
    ),
    _identity(
        "payload hashes not compared",
        "bundle/files.py",
        "if sha256 != record.sha256:",
        "if not record.sha256:",
    ),
)

LOWERED = (*LOWERING, *IDENTITY)
