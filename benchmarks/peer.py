"""The process of one peer: it opens, calls once, calls again, and writes seconds, memory and rows.

It runs in the peer's environment, which may lack vlexport and more: everything is imported where it is used.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_uint8, c_void_p
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

QUESTION, SPOT = "What is here?", "<|vision_start|><|image_pad|><|vision_end|>"
# Of a call: its rows; or the seconds that a library gives for its own tower.
Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a process does: `prepare` or `build`, or calls for `rows` or an `answer`.

    built  the folder of an export; `inputs`, `rows` and `result` are files
    shape  frames, rows and columns of pixels
    picture  a file in place of noise, whose rows are not computed in float64
    began  the clock as the process was started
    """

    verb: str
    kind: str
    checkpoint: str
    built: str
    inputs: str
    rows: str
    result: str
    threads: int
    depth: int
    shape: tuple[int, int, int]
    picture: str
    options: Mapping[str, Any]
    began: float

    def read(self) -> dict[str, Any]:
        with np.load(self.inputs) as arrays:
            return dict(arrays)

    def tensors(self) -> dict[str, Any]:
        import torch

        torch.set_num_threads(self.threads)
        return {name: torch.from_numpy(array) for name, array in self.read().items()}


def prepare(job: Job) -> None:
    """Write the checkpoint unless it is there, a picture or video with its patches, and rows in float64."""
    import torch
    from PIL import Image
    from tokenizers import Tokenizer
    from vlexport.recipes.demo.qwen2_5_vl import contents
    from vlexport.recipes.demo.writing import write_checkpoint

    from benchmarks.towers import THREE_BILLION
    from vlexport import Checkpoint, Pixels
    from vlexport.parity.noise import float64_arithmetic
    from vlexport.recipe import recipe_for

    if not Path(job.checkpoint).exists():
        text = replace(THREE_BILLION.text, layers=2, inner=4096, vocabulary=2048, max_tokens=16384)
        tower = replace(THREE_BILLION, depth=job.depth, branch_gain=(2 * job.depth) ** -0.5, text=text)
        whole, size = contents(tower), {"shortest_edge": 56 * 56, "longest_edge": 4096 * 28 * 28}
        files = {
            name: {**each, "size": size} if "size" in each else each for name, each in whole.files.items()
        }
        # llama.cpp reads no tokenizer without merges.
        tokenizer = replace(whole.tokenizer, words=("What",))
        write_checkpoint(job.checkpoint, replace(whole, files=files, tokenizer=tokenizer))
    frames, height, width = job.shape
    draw = np.random.default_rng(0)
    cells = np.kron(draw.integers(0, 200, (height // 28, width // 28, 3)), np.ones((28, 28, 1), int))
    clip = np.stack([np.roll(cells, 9 * at, 1) + draw.integers(0, 56, cells.shape) for at in range(frames)])
    if job.picture:
        clip = np.asarray(Image.open(job.picture).convert("RGB"))[None]
    kind, pixels = "image" if frames == 1 else "video", torch.from_numpy(clip.astype(np.uint8))
    checkpoint = Checkpoint.open(job.checkpoint)
    recipe = recipe_for(checkpoint)
    media = Pixels(kind=kind, frames=pixels, frames_per_second=None if frames == 1 else 2.0)
    item = recipe.preprocess(recipe.read_config(checkpoint), media)
    prompt = SPOT.replace("<|image_pad|>", "<|image_pad|>" * (len(item.patches) // 4)) + QUESTION
    ids = np.array(Tokenizer.from_file(f"{job.checkpoint}/tokenizer.json").encode(prompt).ids)
    np.savez(
        job.inputs, ids=ids, patches=item.patches.numpy(), grid=np.array(item.grid), frames=pixels.numpy()
    )
    if job.picture:
        return
    visual = transformers_model(job, torch.float32).model.visual
    with torch.inference_mode(), float64_arithmetic(visual, [item]) as [wide]:
        np.save(job.rows, visual(wide.patches, grid_thw=torch.tensor([item.grid])).pooler_output.numpy())


def transformers_model(job: Job, dtype: Any) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(job.checkpoint, dtype=dtype).eval()


def generating(model: Any, tensors: Mapping[str, Any], dtype: Any) -> Call:
    """Return a call that answers with one token, from patches and tokens of the prompt."""
    ids = tensors["ids"][None]
    inputs = {"input_ids": ids, "attention_mask": ids >= 0, "pixel_values": tensors["patches"].to(dtype)}
    inputs |= {"image_grid_thw": tensors["grid"][None]}
    inputs |= {"mm_token_type_ids": (ids == model.config.image_token_id).int()}
    return lambda: model.generate(**inputs, max_new_tokens=1, do_sample=False)


def open_transformers(job: Job) -> Call:
    import torch

    tensors, dtype = job.tensors(), getattr(torch, job.options["dtype"])
    model = transformers_model(job, dtype)
    if job.verb == "answer":
        return generating(model, tensors, dtype)
    visual, patches, grid = model.model.visual, tensors["patches"].to(dtype), tensors["grid"][None]
    return torch.inference_mode()(lambda: visual(patches, grid_thw=grid).pooler_output.float().numpy())


def build_vlexport(job: Job) -> None:
    import vlexport
    from vlexport.backends import Options

    chosen = {**job.options["build"], "options": Options(threads=job.threads)}
    vlexport.build(job.checkpoint, **chosen, output_dir=job.built, name="engine")


def open_vlexport(job: Job) -> Call:
    import vlexport
    from vlexport import DecoderOptions, EncoderOptions, Generation, MediaItem, Request, RuntimeOptions
    from vlexport.backends import Options

    # Equal items would share a call.
    runtime = RuntimeOptions(encoder=EncoderOptions(cache_bytes=0), decoder=DecoderOptions(dtype="float32"))
    decoder, tensors = job.checkpoint if job.verb == "answer" else None, job.tensors()
    options, bundle = Options(threads=job.threads), Path(job.built, "engine")
    pipeline = vlexport.load(bundle, checkpoint=decoder, options=options, runtime=runtime)
    grid = tuple(tensors["grid"].tolist())
    if rule := job.options["prune_before"]:
        # Cells are chosen by their pixels, so preprocessing is part of a call.
        media = vlexport.Pixels(kind="image", frames=tensors["frames"])
        return lambda: pipeline.encode(media, prune_before=rule).embeds.float().numpy()
    item = MediaItem(kind="image" if grid[0] == 1 else "video", patches=tensors["patches"], grid=grid)
    if job.verb == "rows":
        return lambda: pipeline.encode_items([item])[0].embeds.float().numpy()
    one = Generation(max_new_tokens=1, ignore_end=True)
    request = Request(raw_prompt=SPOT + QUESTION, images=[item], generation=one)
    return lambda: list(pipeline.stream(request))


def open_optimum(job: Job) -> Call:
    import torch
    from optimum.intel import OVModelForVisualCausalLM

    tensors, config = job.tensors(), {"INFERENCE_NUM_THREADS": str(job.threads), **job.options}
    model = OVModelForVisualCausalLM.from_pretrained(job.built, ov_config=config, compile=False, device="CPU")
    if job.verb == "answer":
        model.compile()
        return generating(model, tensors, torch.float32)
    for part in (model.vision_embeddings, model.vision_embeddings_merger):
        part.compile()
    return lambda: np.asarray(model.get_vision_embeddings(tensors["patches"], tensors["grid"][None]))


def open_genai(job: Job) -> Call:
    """It gives no rows: a call is an answer of one token, of which it says what its embeddings took."""
    from openvino import Tensor  # noqa: TID251  a peer, not a backend
    from openvino_genai import VLMPipeline

    pipeline = VLMPipeline(job.built, "CPU", INFERENCE_NUM_THREADS=job.threads, **job.options)
    clip = job.read()["frames"]
    media = {"images" if len(clip) == 1 else "videos": [Tensor(clip)]}

    def call() -> float | None:
        metrics = pipeline.generate(QUESTION, max_new_tokens=1, **media).perf_metrics
        seconds = float(metrics.get_prepare_embeddings_duration().mean) / 1e3
        return seconds if job.verb == "rows" else None

    return call


def build_llama(job: Job) -> None:
    """Convert tower and decoder; the converter has no name for the tokenizer of a random checkpoint."""
    sys.path.insert(0, str(Path(sys.prefix, "source/vendor/llama.cpp")))
    import conversion.base
    import convert_hf_to_gguf

    conversion.base.TextModel.get_vocab_base_pre = lambda *_: "qwen2"
    Path(job.built).mkdir(parents=True, exist_ok=True)
    for name, part in (("mmproj", ["--mmproj"]), ("text", [])):
        out = ["--outfile", f"{job.built}/{name}.gguf", "--outtype", job.options["type"]]
        sys.argv = ["convert", job.checkpoint, *out, *part]
        convert_hf_to_gguf.main()


def open_llama(job: Job) -> Call:
    """It takes pictures, so preprocessing is part of a call; two frames of a video are one picture to it."""
    from llama_cpp import llama_cpp as llama
    from llama_cpp import mtmd_cpp as mtmd

    clip, options = job.read()["frames"], mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.print_timings = False, job.threads, False
    settings, place = llama.llama_context_default_params(), llama.llama_pos(0)
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = 4096, job.threads, job.threads
    text, projector = (f"{job.built}/{name}.gguf".encode() for name in ("text", "mmproj"))
    model = llama.llama_model_load_from_file(text, llama.llama_model_default_params())
    tower = mtmd.mtmd_init_from_file(projector, model, options)
    if not model or not tower:
        raise RuntimeError("llama.cpp opened no model")
    decoder = llama.llama_init_from_model(model, settings) if job.verb == "answer" else None
    words = mtmd.mtmd_default_marker() * len(clip) + QUESTION.encode()
    prompt = mtmd.mtmd_input_text(text=words, text_len=len(words), add_special=False, parse_special=True)

    def must(code: int) -> None:
        if code:
            raise RuntimeError(f"mtmd gave code {code}")

    def tokenised() -> Any:
        chunks, array = mtmd.mtmd_input_chunks_init(), (c_void_p * len(clip))()
        for at, frame in enumerate(clip):
            pointer = frame.ctypes.data_as(POINTER(c_uint8))
            array[at] = mtmd.mtmd_bitmap_init(frame.shape[1], frame.shape[0], pointer)
            mtmd.mtmd_bitmap_set_mergeable(array[at], len(clip) > 1)
        must(mtmd.mtmd_tokenize(tower, chunks, byref(prompt), array, len(clip)))
        return chunks

    def encoded() -> Any:
        chunks, rows = tokenised(), []
        for at in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, at)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                must(mtmd.mtmd_encode_chunk(tower, chunk))
                shape = (mtmd.mtmd_input_chunk_get_n_tokens(chunk), llama.llama_model_n_embd(model))
                rows.append(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(tower), shape).copy())
        return np.concatenate(rows)

    def answered() -> None:
        llama.llama_memory_clear(llama.llama_get_memory(decoder), True)
        where, chunks = byref(place), tokenised()
        must(mtmd.mtmd_helper_eval_chunks(tower, decoder, chunks, 0, 0, 512, True, where))

    return answered if job.verb == "answer" else encoded


BUILD = {"llama": build_llama, "vlexport": build_vlexport}
OPEN = {
    "genai": open_genai, "llama": open_llama, "optimum": open_optimum, "transformers": open_transformers,
    "vlexport": open_vlexport,
}  # fmt: skip


def timed(call: Call) -> tuple[float, Any]:
    began = time.monotonic()
    answer = call()
    taken = time.monotonic() - began
    return (answer, None) if isinstance(answer, float) else (taken, answer)


def measure(job: Job) -> dict[str, Any]:
    """Open, call once and twice more; return seconds, bytes once it was open, and versions."""
    call = OPEN[job.kind](job)
    opening, opened = time.monotonic() - job.began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (first, rows), later = timed(call), [timed(call)[0] for _ in range(2)]
    if job.verb == "rows" and rows is not None:
        np.save(job.rows, rows)
    versions = {each.name.replace("_", "-"): each.version for each in distributions()}
    return {"opening": opening, "opened": opened, "first": first, "later": later, "versions": versions}


def main(job: Job) -> None:
    if job.verb in ("rows", "answer"):
        Path(job.result).write_text(json.dumps(measure(job)), encoding="utf-8")
    else:
        (prepare if job.verb == "prepare" else BUILD[job.kind])(job)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
