"""The runner for processors of vLLM 0.32 does not note that videos are pruned, and fails at the first one.

Every process that runs a model imports this.
"""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

load = CPUModelRunner.load_model


def load_model(runner: CPUModelRunner, *arguments: object, **options: object) -> None:
    load(runner, *arguments, **options)
    runner.is_multimodal_pruning_enabled = bool(runner.model_config.multimodal_config.video_pruning_rate)


CPUModelRunner.load_model = load_model
