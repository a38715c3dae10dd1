"""Checkpoints: config files and safetensors of a local folder or of a pinned hub revision.

Importing this package loads no torch; only reading tensors does. Pickles are never loaded, and remote
code is never run.
"""

from vlexport.checkpoint.adapter import Adapter
from vlexport.checkpoint.checkpoint import Checkpoint
from vlexport.checkpoint.config import MAX_LAYERS, PROCESSOR_FIELDS, ConfigView
from vlexport.checkpoint.safetensors import StoredTensor
from vlexport.checkpoint.writing import (
    NUM_BYTE_TOKENS,
    CheckpointContents,
    RandomTensor,
    TokenizerContents,
    random_bias,
    random_scale,
    random_weight,
    special_token_id,
)

__all__ = [
    "MAX_LAYERS",
    "NUM_BYTE_TOKENS",
    "PROCESSOR_FIELDS",
    "Adapter",
    "Checkpoint",
    "CheckpointContents",
    "ConfigView",
    "RandomTensor",
    "StoredTensor",
    "TokenizerContents",
    "random_bias",
    "random_scale",
    "random_weight",
    "special_token_id",
]
