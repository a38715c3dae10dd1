"""Tensor names: the prefix that a checkpoint uses, and the check of the names and shapes below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlexport.checkpoint.source import listed
from vlexport.errors import CheckpointError


def as_mapping(names: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    """Return stored names by wanted name; a plain list wants tensors under their stored names."""
    return names if isinstance(names, Mapping) else {name: name for name in names}


def resolve_prefix(stored: Sequence[str], candidates: Sequence[str], source: str) -> str:
    """Return the one candidate that tensor names begin with."""
    used = [prefix for prefix in candidates if any(name.startswith(prefix) for name in stored)]
    if len(used) == 1:
        return used[0]
    offered = ", ".join(f"'{prefix}'" for prefix in candidates)
    if not used:
        tops = sorted({f"{name.partition('.')[0]}." for name in stored})
        raise CheckpointError(
            f"{source} holds no tensor below {offered}; its names begin with {listed(tops)}. "
            f"Expected a checkpoint with its vision tower. Check that it is not the language model alone."
        )
    raise CheckpointError(
        f"{source} holds tensors below {' and '.join(repr(prefix) for prefix in used)}; expected one of "
        f"{offered}. Save the checkpoint again, with one set of names."
    )


def without(stored: Sequence[str], prefix: str, ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the stored names less those that begin, after the prefix, with one of `ignore`."""
    unread = tuple(prefix + beginning for beginning in ignore)
    return tuple(name for name in stored if not name.startswith(unread))


def match(
    stored: Sequence[str], expected: Mapping[str, tuple[int, ...]], prefix: str, source: str
) -> dict[str, str]:
    """Return stored names by expected name; refuse missing or further ones below the prefix."""
    found = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
    missing = [prefix + name for name in expected if name not in found]
    unexpected = [prefix + name for name in found if name not in expected]
    if missing:
        others = f" It has {len(unexpected)} others there: {listed(unexpected, 3)}." if unexpected else ""
        raise CheckpointError(
            f"{source} lacks {len(missing)} of {len(expected)} expected tensors below '{prefix}': "
            f"{listed(missing)}.{others} Check that the checkpoint is complete and that config.json "
            f"belongs to it."
        )
    if unexpected:
        raise CheckpointError(
            f"{source} has {len(unexpected)} unexpected tensors below '{prefix}': {listed(unexpected)}; "
            f"expected {len(expected)} and no others. Check that config.json belongs to it and that it is "
            f"not quantised."
        )
    return {name: prefix + name for name in expected}


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], prefix: str, source: str
) -> None:
    """Refuse tensors of another shape than expected."""
    wrong = [
        f"{prefix}{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if found[name] != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{source} has {len(wrong)} tensors of another shape than config.json says: {listed(wrong)}. "
            f"Check that config.json belongs to these weights."
        )
