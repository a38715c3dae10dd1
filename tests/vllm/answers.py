"""Answer recorded requests with vLLM in a process of its own: `python -m tests.vllm.answers`, a job a line.

A job has the folder of a recorded set, names of its cases, and options of the engine; each gets a new engine,
in this process, so that it can be read. The line that comes back has tokens and positions by case, and the
calls of the engine of the bundle, or the words of an error. Importing vLLM takes longer than starting it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
import tests.vllm.cpu_runner  # noqa: F401

# What a bundle replaces, by family.
PARTS = ("visual", "vpm", "resampler", "vision_tower", "multi_modal_projector")


def media_of(folder: Path, case: dict) -> dict:
    """The media of a case as vLLM takes them."""
    import torch
    from PIL import Image
    from safetensors.torch import load_file

    tensors = load_file(folder / case["file"])
    found: dict[str, list] = {"image": [], "video": []}
    for at, about in enumerate(case["media"]):
        if case["embeds"]:
            # Fed to vLLM in place of a video: what its tower gave.
            return {
                "video": {
                    "video_embeds": tensors[f"media{at}.tower_out"],
                    "video_grid_thw": tensors[f"media{at}.grid_thw"][None],
                    "second_per_grid_ts": torch.tensor([2 / about["fps"]]),
                }
            }
        raw = tensors[f"media{at}.raw"].numpy()
        if about["kind"] == "image":
            found["image"].append(Image.fromarray(raw))
            continue
        settings = {
            "fps": about["fps"],
            "duration": len(raw) / about["fps"],
            "total_num_frames": len(raw),
            "frames_indices": about.get("frames_indices") or list(range(len(raw))),
            "video_backend": "opencv",
            "do_sample_frames": False,
        }
        found["video"].append((raw, settings))
    return {kind: media for kind, media in found.items() if media}


def answer(wanted: dict) -> dict:
    from vllm import LLM
    from vllm.config import ECTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    folder = Path(wanted["set"])
    cases = {case["name"]: case for case in json.loads((folder / "cases.json").read_text())}
    chosen = [cases[name] for name in wanted["cases"]]
    rate, chunk = chosen[0]["q"], chosen[0]["chunk_budget"]
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 1,
        "max_num_batched_tokens": chunk or 2048,
        "enable_chunked_prefill": bool(chunk),
        "limit_mm_per_prompt": {"image": 2, "video": 2},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "seed": 0,
        **({"video_pruning_rate": rate} if rate else {}),
        **({"enable_mm_embeds": True} if any(case["embeds"] for case in chosen) else {}),
        **wanted["options"],
    }
    if "ec_transfer_config" in options:
        options["ec_transfer_config"] = ECTransferConfig(**options["ec_transfer_config"])
    model = None
    try:
        model = LLM(model=str(wanted.get("checkpoint") or folder / "checkpoint"), **options)
        return tokens_of(model, folder, chosen)
    finally:
        if model is not None:
            model.llm_engine.engine_core.shutdown()
        del model
        gc.collect()
        cleanup_dist_env_and_memory()


def tokens_of(model: Any, folder: Path, chosen: list[dict]) -> dict:
    """Return tokens and positions by case, and what became of the tower where it can be read."""
    import torch
    from vllm import SamplingParams

    # With several ranks the runners are in processes of their own.
    worker = getattr(model.llm_engine.model_executor, "driver_worker", None)
    runner: Any = worker and worker.worker.model_runner
    parts = [getattr(runner.model, name) for name in PARTS if hasattr(runner.model, name)] if runner else []
    session = next((part.session for part in parts if hasattr(part, "session")), None)
    # vLLM has run the largest image by now.
    before = session.num_calls if session else 0
    found: dict[str, Any] = {"prompts": {}, "tokens": {}, "positions": {}}
    seen: list[Any] = []
    if runner:
        runner.model.register_forward_pre_hook(
            lambda _, __, given: seen.append(given["positions"].clone()), with_kwargs=True
        )
    for case in chosen:
        seen.clear()
        request = {"prompt": case["prompt"]}
        if case["media"]:
            request["multi_modal_data"] = media_of(folder, case)
        if case.get("prune_before"):
            request["mm_processor_kwargs"] = {"prune_before": case["prune_before"]}
        (answered,) = model.generate([request], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        found["prompts"][case["name"]] = list(answered.prompt_token_ids)
        found["tokens"][case["name"]] = list(answered.outputs[0].token_ids)
        # Of the prompt, chunk after chunk, and of the tokens decoded after it.
        found["positions"][case["name"]] = torch.cat(seen, dim=-1).tolist() if seen else None
    if runner:
        found["parameters"] = sum(each.numel() for part in parts for each in part.parameters())
        found["calls"] = session.num_calls - before if session else None
    return found


def main() -> None:
    """Answer jobs until there are no more."""
    import torch

    # vLLM's resampler asks whatever the device, and torch for processors raises.
    torch.cuda.is_current_stream_capturing = lambda: False
    # vLLM logs to the standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception:  # noqa: BLE001  whatever it was, the next job is another
            found = {"error": traceback.format_exc()}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
