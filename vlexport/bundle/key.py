"""The name of a build: a digest over everything that changes the result, and over nothing else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlexport.bundle.files import check_digest
from vlexport.codec import JsonObject, canonical, encode, freeze_object
from vlexport.specs import ShapeProfile
from vlexport.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildKey:
    """Every input of a build. Time, working directory, environment and the place of the output are none."""

    recipe: str
    recipe_digest: str
    package_digest: str
    weights_digest: str
    config_digest: str
    preprocessing: JsonObject
    backend: str
    backend_version: str
    torch_version: str
    exporter_versions: Mapping[str, str]
    dtype: str
    fp32_layers: Mapping[str, str]
    quantisation: str | None
    attention_form: str
    profile: ShapeProfile
    options: JsonObject
    target: Target

    def __post_init__(self) -> None:
        for name in ("recipe_digest", "package_digest", "weights_digest", "config_digest"):
            check_digest(getattr(self, name), name)
        for name in ("preprocessing", "exporter_versions", "fp32_layers", "options"):
            object.__setattr__(self, name, freeze_object(getattr(self, name), name))


def key_of(build: BuildKey) -> str:
    """Return the SHA-256 of the canonical JSON of every field."""
    content = encode(build)
    return hashlib.sha256(canonical({"vlexport build key": 2, "build": content})).hexdigest()


def entry_path(into: Path, build: BuildKey) -> Path:
    """Return the path of a build under `into`: a part for people, and a part that no other build has."""
    words = (build.recipe, build.backend, build.quantisation or build.dtype, build.profile.name)
    readable = "-".join(re.sub(r"[^A-Za-z0-9_]+", "_", word)[:16].strip("_") or "x" for word in words)
    return into / f"{readable}-{key_of(build)[:16]}"


def source_digest(*paths: Path) -> str:
    """Return the SHA-256 over Python sources: files, or folders whose `.py` files count with their names."""
    digest = hashlib.sha256()
    for path in paths:
        sources = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for source in sources:
            name = source.relative_to(path).as_posix() if source != path else source.name
            content = hashlib.sha256(source.read_bytes()).hexdigest()
            digest.update(f"{len(name)} {name} {content}\n".encode())
    return digest.hexdigest()
