"""Checkpoints: config files and safetensors of a local folder or of a pinned hub revision.

Importing this package loads no torch; only reading tensors does. Pickles are never loaded, and remote
code is never run.
"""

from vlexport.checkpoint.adapter import Adapter
from vlexport.checkpoint.checkpoint import Checkpoint
from vlexport.checkpoint.config import MAX_LAYERS, PROCESSOR_FIELDS, ConfigView

__all__ = [
    "MAX_LAYERS",
    "PROCESSOR_FIELDS",
    "Adapter",
    "Checkpoint",
    "ConfigView",
]
