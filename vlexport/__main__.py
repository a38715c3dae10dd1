"""`python -m vlexport`: the command line, from a checkout that is not installed."""

from vlexport.cli import main

main()
