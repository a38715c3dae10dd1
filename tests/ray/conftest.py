"""The suite of `make test-ray`, which sets up an environment with Ray; elsewhere nothing is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
