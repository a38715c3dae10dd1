"""What is being checked, and how much of a machine the check may take."""

from vlexport.build_spec import HEAVY
from vlexport.build_spec import BuildSpec as Subject

__all__ = [
    "DEEP",
    "HEAVY",
    "MAX_PATCHES",
    "MAX_PATCHES_HEAVY",
    "MAX_WIDE_PATCHES",
    "MAX_WIDE_PATCHES_HEAVY",
    "Subject",
]

# Beyond this depth the noise of a whole tower hides small faults, so every block is checked by itself.
DEEP = 8
MAX_PATCHES, MAX_PATCHES_HEAVY = 4096, 640
# The float64 pass of the reference is measured on calls of at most this many patches; larger ones are held
# to float32, with the largest noise of the others.
MAX_WIDE_PATCHES, MAX_WIDE_PATCHES_HEAVY = 1024, 128
