"""Graphs of pruning and positions as a bundle holds them, compiled for a device."""

from __future__ import annotations

import tempfile
from pathlib import Path

from vlexport._build.token_graphs import TokenGraphs, open_graphs, planned_graphs, write_graphs
from vlexport.backends import Folder


def packaged(method: str, dtype: str, device: str = "cpu") -> TokenGraphs:
    """Return the packages of a method; eager graphs with a reason where they cannot be compiled."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bundle"
        folder.mkdir()
        identity = write_graphs(planned_graphs(method, device), folder, dtype)
        return open_graphs(identity, Folder(folder), dtype)
