"""What `encode` gives: tokens of one item, and the file that holds those of a call."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.bundle.os_errors import shortage
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Tokens of one item: `embeds` [tokens, width], its grid in patches, seconds between grid frames.

    After pruning `embeds` holds the kept rows only, `kept` their indices and `mask` all tokens' fate.
    """

    kind: str
    embeds: Tensor
    grid: tuple[int, int, int]
    seconds_per_grid: float | None
    layers: Mapping[str, Tensor]
    kept: Tensor | None = None
    mask: Tensor | None = None


def check_out(out: Path) -> None:
    """Refuse a place that cannot be written before any work is done for it."""
    folder = out.parent
    if out.suffix != ".safetensors":
        raise RequestError(f"--output {out}: a file name that ends in .safetensors is expected.")
    if not folder.is_dir():
        raise RequestError(f"--output {out}: the folder {folder} does not exist. Make it first.")
    if out.is_dir():
        raise RequestError(f"--output {out}: is a folder, a file is expected. Name another one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(out, "Permission denied")


def save(items: Mapping[str, Encoded], out: Path) -> dict[str, list[int]]:
    """Write all items under their names; the file appears whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_out(out)
    tensors = _named(items)
    beside = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        # The library makes a file that only its owner can read; a result has the rights of any new file.
        beside.touch()
        rights = stat.S_IMODE(beside.stat().st_mode)
        save_file(tensors, beside)
        beside.chmod(rights)
        beside.replace(out)
    except (OSError, SafetensorError) as error:
        raise shortage(error, out.parent) or _unwritable(out, str(error)) from error
    finally:
        beside.unlink(missing_ok=True)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _unwritable(out: Path, why: str) -> RequestError:
    return RequestError(f"--output {out}: cannot be written ({why}). Name a place that you may write to.")


def _named(items: Mapping[str, Encoded]) -> dict[str, Tensor]:
    import torch

    tensors: dict[str, Tensor] = {}
    for name, item in items.items():
        tensors[f"{name}.embeds"] = item.embeds
        tensors[f"{name}.grid"] = torch.tensor(item.grid)
        tensors |= {f"{name}.{layer}": rows for layer, rows in item.layers.items()}
        if item.kept is not None and item.mask is not None:
            tensors |= {f"{name}.kept": item.kept, f"{name}.mask": item.mask}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
