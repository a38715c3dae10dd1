"""`python -m vlexport`: the command line, from a checkout that is not installed."""

import os
import sys

# `-m` looks for all imports in the current folder first; only a checkout needs it, after the libraries.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  a trap may be called pathlib
    here = sys.path.pop(0)
    sys.path += [here] if __file__.startswith(os.path.join(here, "")) else []  # noqa: PTH118

from vlexport.cli import main

main()
