"""Every error that vlexport raises on purpose, and the exit code of each on the command line.

VlexportError                    1    (never raised itself)
├── RequestError                 2    the request cannot be served as it was put
│   ├── CheckpointError               a checkpoint that cannot be read or lacks what the recipe needs
│   ├── UnknownModelError             no recipe serves this model type
│   ├── UnsupportedError              a pair of options that no backend or recipe offers
│   ├── MediaError                    an image or video that cannot be read
│   └── InputError                    tensors, grids or options that contradict each other
├── ParityError                  3    a bundle that failed its accuracy check
├── MisfitError                  4    built for another machine, library version or recipe
├── BundleError                  5    a bundle that is corrupt
│   └── UntrustedError                intact, but neither built here nor approved
├── LimitError                   6    readable, but outside a profile or a limit
├── ResourceError                7    memory or disk ran out
└── LockedError                  8    another build holds the same entry

Messages say what was given, what was expected, and what to do next.
"""


class VlexportError(Exception):
    """Root of the tree; `exit_code` is what the command line returns."""

    exit_code = 1


class RequestError(VlexportError):
    """The request cannot be served as it was put."""

    exit_code = 2


class CheckpointError(RequestError):
    """A checkpoint that cannot be read or lacks what the recipe needs."""


class UnknownModelError(RequestError):
    """No recipe serves this model type."""


class UnsupportedError(RequestError):
    """A pair of options that no backend or recipe offers."""


class MediaError(RequestError):
    """An image or video that cannot be read."""


class InputError(RequestError):
    """Tensors, grids or options that contradict each other."""


class ParityError(VlexportError):
    """A bundle that failed its accuracy check."""

    exit_code = 3


class MisfitError(VlexportError):
    """Built for another machine, library version or recipe."""

    exit_code = 4


class BundleError(VlexportError):
    """A bundle that is corrupt."""

    exit_code = 5


class UntrustedError(BundleError):
    """Intact, but neither built here nor approved."""


class LimitError(VlexportError):
    """Readable, but outside a profile or a limit."""

    exit_code = 6


class ResourceError(VlexportError):
    """Memory or disk ran out."""

    exit_code = 7


class LockedError(VlexportError):
    """Another build holds the same entry."""

    exit_code = 8
