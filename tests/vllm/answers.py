"""Answer recorded requests with vLLM, in a process of its own: `python -m tests.vllm.answers JOB OUT`.

JOB is a file with the folder of a recorded set, names of its cases, and options of the engine. OUT gets
tokens by case, and the calls of the engine of the bundle. vLLM runs in this process, so that it can be read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


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


def main(job: Path, out: Path) -> None:
    wanted = json.loads(job.read_text())
    folder = Path(wanted["set"])
    cases = {case["name"]: case for case in json.loads((folder / "cases.json").read_text())}
    chosen = [cases[name] for name in wanted["cases"]]
    rate, chunk = chosen[0]["q"], chosen[0]["chunk_budget"]
    options = {"video_pruning_rate": rate} if rate else {}
    if any(case["embeds"] for case in chosen):
        options["enable_mm_embeds"] = True

    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig

    if transfer := wanted["options"].pop("ec_transfer_config", None):
        options["ec_transfer_config"] = ECTransferConfig(**transfer)
    model = LLM(
        model=str(wanted.get("checkpoint") or folder / "checkpoint"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        max_num_batched_tokens=chunk or 2048,
        enable_chunked_prefill=bool(chunk),
        limit_mm_per_prompt={"image": 2, "video": 2},
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        seed=0,
        **options,
        **wanted["options"],
    )
    # With several ranks the runners are in processes of their own.
    worker = getattr(model.llm_engine.model_executor, "driver_worker", None)
    runner: Any = worker and worker.worker.model_runner
    tower = runner and getattr(runner.model.visual, "tower", None)
    # vLLM has run the largest image by now.
    before = tower.num_calls if tower else 0
    if rate:
        # The runner for processors of vLLM 0.32 does not set it when it loads a model, and then fails.
        runner.is_multimodal_pruning_enabled = True
    answers = {}
    for case in chosen:
        request = {"prompt": case["prompt"]}
        if case["media"]:
            request["multi_modal_data"] = media_of(folder, case)
        (answer,) = model.generate([request], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        answers[case["name"]] = list(answer.outputs[0].token_ids)
    found: dict[str, object] = {"tokens": answers}
    if runner:
        found["parameters"] = sum(each.numel() for each in runner.model.visual.parameters())
        found["calls"] = tower.num_calls - before if tower else None
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
