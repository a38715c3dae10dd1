"""Shards of a collection as Parquet files beside them, a row for each item."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.errors import MisfitError
from vlexport.system import replacing

if TYPE_CHECKING:
    import pyarrow
    from torch import Tensor

# Of an item's record; an item that failed has an error and no rows.
TEXTS = ("item", "source", "id", "status", "kind", "sha256", "rows_sha256")
COUNTS = ("bytes", "tokens")


def require_parquet() -> None:
    """Refuse where the library is missing, before anything is encoded."""
    if find_spec("pyarrow") is None:
        raise MisfitError(
            "Parquet needs the package pyarrow, which is not installed. "
            "pip install 'vlexport[parquet]' installs it."
        )


def write_parquet(shard: Path) -> None:
    """Write a shard's rows to a Parquet file of its name, whole or not at all, unless it is there.

    Embeddings in bfloat16, which the format lacks, become float32; every value is the same.
    """
    import pyarrow as arrow
    from pyarrow import parquet
    from safetensors import safe_open

    path = shard.with_suffix(".parquet")
    with safe_open(shard, framework="pt") as file:
        metadata = file.metadata()
        if path.exists() and _is_of(path, metadata):
            return
        columns: dict[str, pyarrow.DataType] = {}
        tensors: dict[str, dict[str, str]] = {}
        for name in file.keys():  # noqa: SIM118  the reader is no dict
            _, number, column = name.split(".", 2)
            tensors.setdefault(f"item.{number}", {})[column] = name
            if column not in columns:
                columns[column] = _row(file.get_tensor(name)).type
        fields = [*((name, arrow.string()) for name in TEXTS), *((name, arrow.int64()) for name in COUNTS)]
        schema = arrow.schema([*fields, ("error", arrow.string()), *columns.items()], metadata)
        with replacing(path) as temporary, temporary.open("wb") as out:
            with parquet.ParquetWriter(out, schema) as writer:
                for record in json.loads(metadata["items"]):
                    error = record.get("error", {}).get("message")
                    values = {name: arrow.array([_valid(record.get(name))], kind) for name, kind in fields}
                    values["error"] = arrow.array([_valid(error)], arrow.string())
                    of_item = tensors.get(record["item"], {})
                    for column, kind in columns.items():
                        name = of_item.get(column)
                        values[column] = _row(file.get_tensor(name)) if name else arrow.nulls(1, kind)
                    writer.write_batch(arrow.record_batch(list(values.values()), schema=schema))
            out.flush()
            os.fsync(out.fileno())


def _is_of(path: Path, metadata: dict[str, str]) -> bool:
    import pyarrow
    from pyarrow import parquet

    try:
        written = parquet.read_schema(path).metadata or {}
    except (OSError, pyarrow.ArrowInvalid):
        return False
    return all(written.get(name.encode()) == value.encode() for name, value in metadata.items())


def _valid(value: Any) -> Any:
    """Return a value with bytes of file names that are no UTF-8, which Parquet does not hold, escaped."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _row(tensor: Tensor) -> Any:
    """Return one row of a column: a tensor's values as a list, or its rows as lists of one length."""
    import pyarrow
    import torch

    plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    values = pyarrow.array(plain.reshape(-1).numpy())
    if plain.ndim == 2:
        values = pyarrow.FixedSizeListArray.from_arrays(values, plain.shape[1])
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(plain)], pyarrow.int32()), values)
