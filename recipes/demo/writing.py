"""Random checkpoints, complete with tokenizer and processor files, written one shard at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.errors import CheckpointError

if TYPE_CHECKING:
    import torch


# Byte-level tokenizers have one token per byte; special tokens come after them.
NUM_BYTE_TOKENS = 256
END, PAD = "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomTensor:
    """Shape and distribution of one tensor: normal, the first `doubled_rows` rows times two.

    Numbers depend on the seed and on `stream` alone (the tensor's name where it is empty), so the same
    weights can be written under other names, in other shards, or without their neighbours.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float
    doubled_rows: int = 0
    stream: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerContents:
    """A byte-level tokenizer: 256 bytes, the special tokens in their order, then `words` as one token each.

    A word that follows another one begins with its space. Words without one share no beginnings with the
    middle of others, such as capitalised ones.
    """

    special_tokens: tuple[str, ...]
    chat_template: str
    max_length: int = 4096
    words: tuple[str, ...] = ()

    def token_id(self, special_token: str) -> int:
        return NUM_BYTE_TOKENS + self.special_tokens.index(special_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContents:
    """A whole checkpoint: config.json, further JSON files by name, tokenizer, tensors by stored name."""

    config: Mapping[str, object]
    files: Mapping[str, Mapping[str, object]]
    tokenizer: TokenizerContents
    tensors: Mapping[str, RandomTensor]
    dtype: str = "float32"


def write_checkpoint(
    folder: str | Path, contents: CheckpointContents, *, seed: int = 0, shards: int = 1
) -> Path:
    """Write the checkpoint, whole or absent; contents and seed decide the tensors, whatever the shards."""
    target = Path(folder).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{target} exists already; expected a new or empty folder for a random checkpoint. "
            f"Remove it or name another."
        )
    if not 1 <= shards <= len(contents.tensors):
        raise CheckpointError(
            f"{shards} shards given; expected 1 to {len(contents.tensors)}, the number of tensors. "
            f"Give another number."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp gives 0700, a checkpoint is an ordinary folder
        _write_json(temporary / "config.json", contents.config)
        for name, values in contents.files.items():
            _write_json(temporary / name, values)
        _write_tokenizer(temporary, contents.tokenizer)
        _write_tensors(temporary, contents, seed, shards)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, contents: TokenizerContents) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(contents.words)
    # Special tokens keep their numbers behind the bytes.
    pieces = alphabet + [*contents.special_tokens, *map("".join, merges)] * bool(merges)
    tokenizer = Tokenizer(models.BPE(vocab={sign: at for at, sign in enumerate(pieces)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in contents.special_tokens]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(contents.special_tokens),
        "model_max_length": contents.max_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(contents.chat_template, encoding="utf-8")


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    in_order = sorted(words, key=lambda word: (word[0] != " ", word))
    spelled = [word.replace(" ", "\u0120") for word in in_order]
    return list(dict.fromkeys((word[:at], word[at]) for word in spelled for at in range(1, len(word))))


def _write_tensors(folder: Path, contents: CheckpointContents, seed: int, shards: int) -> None:
    from safetensors.torch import save_file

    names = sorted(contents.tensors)
    # Equal counts, in the order of the names, so a tower may straddle two shards as in large checkpoints.
    homes = {name: at * shards // len(names) for at, name in enumerate(names)}
    total, places = 0, {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {
            name: _draw(name, contents.tensors[name], seed, contents.dtype)
            for name in names
            if homes[name] == shard
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places.update(dict.fromkeys(tensors, file))
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _draw(name: str, spec: RandomTensor, seed: int, dtype: str) -> torch.Tensor:
    import numpy
    import torch

    key = hashlib.sha256(f"{seed}/{spec.stream or name}".encode()).digest()
    # PCG64 is fixed by name: numpy may change what default_rng() gives.
    source = numpy.random.Generator(numpy.random.PCG64(int.from_bytes(key)))
    values = source.standard_normal(spec.shape, dtype=numpy.float32)
    tensor = torch.from_numpy(values) * spec.std + spec.mean
    tensor[: spec.doubled_rows] *= 2.0
    return tensor.to(getattr(torch, dtype))
