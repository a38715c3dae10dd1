"""Judgements on disk, so that a run that was stopped goes on where it was; other sources begin anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock


@dataclass(frozen=True, kw_only=True)
class Log:
    """One JSON object a line: the digest of the sources, a bug's name, the faults that each level saw."""

    path: Path | None
    digest: str
    lock: Lock

    @classmethod
    def of(cls, path: Path | None, digest: str) -> Log:
        """A log at this place; without one nothing is kept."""
        return cls(path=path, digest=digest, lock=Lock())

    def known(self) -> dict[str, dict[str, str]]:
        """Faults by name of these very sources."""
        if self.path is None or not self.path.exists():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        # The last line of a run that was killed may be short.
        entries = [json.loads(line) for line in lines if line.endswith("}}")]
        return {entry["name"]: entry["faults"] for entry in entries if entry["sources"] == self.digest}

    def add(self, name: str, faults: Mapping[str, str]) -> None:
        """Append one judgement."""
        if self.path is not None:
            line = json.dumps({"sources": self.digest, "name": name, "faults": dict(faults)})
            with self.lock, self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
