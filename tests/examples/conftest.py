"""The suite of `make test-examples`, in an environment with Gradio; elsewhere nothing is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("gradio") and find_spec("playwright") else ["test_*.py"]
