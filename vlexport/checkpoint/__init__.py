"""Checkpoints: config files and safetensors of a local folder or of a pinned hub revision.

Importing this package loads no torch; only reading tensors does. Pickles are never loaded, and remote
code is never run.
"""

from vlexport.checkpoint.checkpoint import Checkpoint
from vlexport.checkpoint.config import ConfigView
from vlexport.checkpoint.header import StoredTensor

__all__ = ["Checkpoint", "ConfigView", "StoredTensor"]
