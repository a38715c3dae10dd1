"""A digest of Python sources: results are of one state of a tree."""

from __future__ import annotations

import hashlib
from pathlib import Path


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
