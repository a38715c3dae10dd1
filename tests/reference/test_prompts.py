"""Text round media: a prompt through the runtime, against what transformers' processor and the files give."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer
from transformers.video_utils import VideoMetadata
from vlexport.recipes.demo import qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from tests.golden_data import FOLDER
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.pruning.cells import Pruning
from vlexport.recipe import PromptItem, find_recipe, recipe_for
from vlexport.runtime.preprocess import Preprocessor
from vlexport.runtime.prompt import Prompter
from vlexport.runtime.request import Generation, Request, RequestLimits
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import MediaItem, Pixels

LIMITS = RequestLimits()
ORDERS = (["image"], ["video"], ["video", "image"], ["image", "video", "image"], ["video", "video", "image"])


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("words") / "checkpoint", depth=1))


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """A family that writes times as text."""
    tiny = qwen3_vl.Tiny(depth=1, levels=(0,), with_decoder=False)
    folder = tmp_path_factory.mktemp("words") / "tiny"
    return Checkpoint.open(write_checkpoint(folder, qwen3_vl.contents(tiny), seed=0))


def prompter(checkpoint, layout=None):
    recipe: Any = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    rule = recipe.language.prompt_of(layout)
    made = Prompter(CheckpointTokenizer(checkpoint), rule, lambda item: rule.expand(config, item))
    return recipe, config, made


def pixels(kind: str, number: int) -> Pixels:
    """Sizes differ, so that items of one kind can be distinguished by their number of tokens."""
    frames = 1 if kind == "image" else 2 * (number + 1)
    shape = (frames, 84 + 28 * number, 112, 3)
    return Pixels(
        kind=kind,
        frames=torch.zeros(shape, dtype=torch.uint8),
        frames_per_second=None if kind == "image" else 2.0,
    )


def expanded(checkpoint, kinds, *, pruned: bool):
    """Ids of a chat with these media, room for each, and the items in the order of the prompt."""
    recipe, config, made = prompter(checkpoint)
    content = [part for kind in kinds for part in ({"type": "text", "text": f"a {kind}:"}, {"type": kind})]
    numbers = {kind: iter(range(len(kinds))) for kind in ("image", "video")}
    media = {kind: [pixels(kind, next(numbers[kind])) for each in kinds if each == kind] for kind in numbers}
    request = Request(
        messages=[{"role": "user", "content": content}], images=media["image"], videos=media["video"]
    )
    marked = made.mark(request, LIMITS)
    assert list(marked.kinds) == list(kinds)
    items, counts = [], {"image": 0, "video": 0}
    for source, kind in zip(marked.sources, kinds, strict=True):
        item = recipe.preprocess(config, source)
        rows = recipe.num_tokens(config, item)
        rows = rows - 1 if pruned and kind == "video" else rows
        items.append(PromptItem(item=item, number=counts[kind], num_rows=rows))
        counts[kind] += 1
    return made.expand(marked, items, LIMITS), items


@pytest.mark.seconds
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("kinds", ORDERS, ids="-".join)
def test_ids_are_those_of_their_processor(windowed, kinds, pruned) -> None:
    """Its template, its text for each grid, its tokenizer; a pruned video loses a slot."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    found, items = expanded(windowed, kinds, pruned=pruned)
    tokenizer: Any = AutoTokenizer.from_pretrained(windowed.path)
    sizes = SimpleNamespace(merge_size=2)
    theirs = SimpleNamespace(
        image_processor=sizes, video_processor=sizes, image_token="<|image_pad|>", video_token="<|video_pad|>"
    )
    content = [part for kind in kinds for part in ({"type": "text", "text": f"a {kind}:"}, {"type": kind})]
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    for kind in ("image", "video"):
        grids = torch.tensor([each.item.grid for each in items if each.kind == kind]).reshape(-1, 3)
        replace_token = getattr(Qwen2_5_VLProcessor, f"replace_{kind}_token")
        texts = iter(
            replace_token(theirs, {f"{kind}_grid_thw": grids}, number)[: -len(f"<|{kind}_pad|>") or None]
            if pruned and kind == "video"
            else replace_token(theirs, {f"{kind}_grid_thw": grids}, number)
            for number in range(len(grids))
        )
        head, *rest = re.split(rf"<\|{kind}_pad\|>", text)
        text = head + "".join(each + after for each, after in zip(texts, rest, strict=True))
    assert list(found.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    config = json.loads((windowed.path / "config.json").read_text())
    for room, item in zip(found.placeholders, items, strict=True):
        ids = found.ids[room.offset : room.offset + room.length]
        assert set(ids) == {config[f"{item.kind}_token_id"]}
        assert found.ids[room.offset - 1] == config["vision_start_token_id"]
        assert found.ids[room.offset + room.length] == config["vision_end_token_id"]


def test_a_chat_gets_no_tokens_at_its_ends_and_a_raw_prompt_those_of_its_tokenizer(windowed, tmp_path):
    """As `apply_chat_template`, which leaves them to the template."""
    path = shutil.copytree(windowed.path, tmp_path / "copy")
    stored = json.loads((path / "tokenizer.json").read_text())
    first = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<|endoftext|>")
    begin = {"SpecialToken": {"id": "begin", "type_id": 0}}
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"begin": {"id": "begin", "ids": [first], "tokens": ["<|endoftext|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(stored))
    made = prompter(Checkpoint.open(path))[2]
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    for request, ids in (
        (Request(prompt="a"), chat["input_ids"]),
        (Request(raw_prompt="a"), tokenizer("a")["input_ids"]),
    ):
        assert list(made.expand(made.mark(request, LIMITS), [], LIMITS).ids) == ids
    assert tokenizer("a")["input_ids"][0] == first


def wanted_text(version: str, kind: str, number: int, item: MediaItem, queries: int) -> str:
    """As processing_minicpmv.py of each release writes it."""
    run = "<unk>" * queries
    if kind == "video":
        return f"<image>{run}</image>" * item.grid[0]
    whole = f"<image>{run}</image>"
    early = version in ("2.0", "2.5")
    whole = whole if early else f"<image_id>{number}</image_id>{whole}"
    if not item.slices:
        return whole
    rows, columns = (item.grid[axis + 1] // item.slices[-1][axis] for axis in (0, 1))
    if early:
        lines = "\n".join([f"<image>{run}</image>" * columns] * rows)
        return f"{whole}<slice>{lines}</slice>"
    return whole + "\n".join([f"<slice>{run}</slice>" * columns] * rows)


@pytest.mark.parametrize("version", VERSIONS)
def test_slices_stand_in_the_words_of_their_release(version, tmp_path) -> None:
    checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(version=version, depth=1)))
    recipe, config, made = prompter(checkpoint)
    takes_videos = version not in ("2.0", "2.5")
    kinds = ["image", "video", "image", "image"] if takes_videos else ["image"] * 3
    images = [(60, 90), (300, 160), (130, 420)]
    sizes = iter(images)
    shapes = [(1, *next(sizes)) if kind == "image" else (3, 84, 112) for kind in kinds]
    media = [
        Pixels(
            kind=kind,
            frames=torch.zeros(*shape, 3, dtype=torch.uint8),
            frames_per_second=1.0 if kind == "video" else None,
        )
        for kind, shape in zip(kinds, shapes, strict=True)
    ]
    content = [{"type": kind} for kind in kinds]
    request = Request(
        messages=[{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}],
        images=[each for each in media if each.kind == "image"],
        videos=[each for each in media if each.kind == "video"],
    )
    marked = made.mark(request, LIMITS)
    items: list[PromptItem] = []
    wanted = []
    for source, kind in zip(marked.sources, kinds, strict=True):
        number = sum(each.kind == kind for each in items)
        item = recipe.preprocess(config, source)
        rows = recipe.num_tokens(config, item)
        items.append(PromptItem(item=item, number=number, num_rows=rows))
        wanted.append(wanted_text(version, kind, number, item, config.tower.queries))
    found = made.expand(marked, items, LIMITS)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    text = "<|im_start|>user\n" + "\n".join([*wanted, "What?"]) + "<|im_end|>\n<|im_start|>assistant\n"
    assert list(found.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    slot = tokenizer.convert_tokens_to_ids("<unk>")
    for room, item in zip(found.placeholders, items, strict=True):
        assert room.is_embed is not None
        ids = found.ids[room.offset : room.offset + room.length]
        assert [each == slot for each in ids] == list(room.is_embed)
        assert sum(room.is_embed) == item.num_rows


def test_items_of_a_request_are_numbered_kind_by_kind_in_the_order_of_its_prompt() -> None:
    """As `test_slices_stand_in_the_words_of_their_release` numbers them by hand."""
    given: list[PromptItem] = []
    kinds = ["image", "video", "image", "video", "image"]
    media = [MediaItem(kind=kind, patches=torch.zeros(1, 1), grid=(1, 1, 1)) for kind in kinds]

    def expand(_: object, items: list[PromptItem], limits: object) -> object:
        given.extend(items)
        return SimpleNamespace(ids=[0], placeholders=())

    parts: Any = SimpleNamespace(
        media=SimpleNamespace(session=SimpleNamespace(num_tokens=lambda _: 1)),
        pruner=SimpleNamespace(num_kept=lambda *_: 1, frame_rows=lambda *_: []),
        prompter=SimpleNamespace(expand=expand),
        decoder=SimpleNamespace(max_tokens=99),
    )
    state: Any = SimpleNamespace(
        media=[SimpleNamespace(item=item) for item in media],
        request=Request(raw_prompt="x", generation=Generation(max_new_tokens=1)),
        pruning=Pruning(), marked=None, limits=LIMITS,
    )  # fmt: skip
    Preprocessor.expand_prompt(parts, state, [None] * len(media))
    assert [(each.item.kind, each.number) for each in given] == [
        ("image", 0), ("video", 0), ("image", 1), ("video", 1), ("image", 2),
    ]  # fmt: skip


def test_time_between_frames_is_what_their_processor_gives(windowed) -> None:
    """Seconds of a grid: temporal patch over the rate, float32."""
    recipe = find_recipe("qwen2_5_vl")
    config = recipe.read_config(windowed)
    for rate in (0.3, 1.0, 2.0, 3.0, 23.976):
        film = Pixels(
            kind="video", frames=torch.zeros(4, 84, 84, 3, dtype=torch.uint8), frames_per_second=rate
        )
        assert recipe.preprocess(config, film).seconds_per_grid == torch.tensor(2 / rate).item()


RATES = (2.0, 24.0, 29.97, 1 / 3, 7.5)


def media(kind: str, number: int) -> Pixels:
    """Sizes, lengths and rates differ; every second video is sampled from a longer one."""
    if kind == "image":
        return Pixels(kind=kind, frames=torch.zeros((1, 64 + 32 * number, 96, 3), dtype=torch.uint8))
    frames, rate = torch.zeros((3 + number, 64, 96 + 32 * number, 3), dtype=torch.uint8), RATES[number]
    seconds = tuple(at * 5 / rate for at in range(len(frames))) if number % 2 else ()
    return Pixels(kind=kind, frames=frames, frames_per_second=rate, seconds=seconds)


def their_text(item: MediaItem, pixels: Pixels) -> str:
    """Return what their processor writes in place of the token of one item."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    theirs: Any = SimpleNamespace(
        image_processor=sizes,
        video_processor=sizes,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, cast("Any", None)),
    )
    grids = torch.tensor([item.grid])
    if item.kind == "image":
        return Qwen3VLProcessor.replace_image_token(theirs, {"image_grid_thw": grids}, 0)
    step = 5 if pixels.seconds else 1
    indices = [at * step for at in range(len(pixels.frames))]
    about = VideoMetadata(total_num_frames=100, fps=pixels.frames_per_second, frames_indices=indices)
    return Qwen3VLProcessor.replace_video_token(
        theirs, {"video_grid_thw": grids, "video_metadata": [about]}, 0
    )


def room_for(item: MediaItem, number: int, rows: int) -> PromptItem:
    """An item of a prompt that is not pruned."""
    frames = item.grid[0]
    each = (rows // frames,) * frames
    return PromptItem(item=item, number=number, num_rows=rows, count_frames=lambda: each)


@pytest.mark.seconds
@pytest.mark.parametrize("layout", [None, "bare"])
@pytest.mark.parametrize("kinds", ORDERS, ids="-".join)
def test_ids_with_written_times_are_those_of_their_processor(spelled, kinds, layout):
    """Its text for each item; a `bare` one, as older releases wrote it, has no markers round all frames."""
    recipe, config, made = prompter(spelled, layout)
    pixels = [media(kind, kinds[:at].count(kind)) for at, kind in enumerate(kinds)]
    texts = [
        part for kind in kinds for part in (f"a {kind}:", f"<|vision_start|><|{kind}_pad|><|vision_end|>")
    ]
    request = Request(
        raw_prompt="".join(texts) + "what?",
        images=[each for each in pixels if each.kind == "image"],
        videos=[each for each in pixels if each.kind == "video"],
    )
    marked = made.mark(request, LIMITS)
    tokenizer: Any = AutoTokenizer.from_pretrained(spelled.path)
    items, wanted, rooms = list[PromptItem](), list[int](), list[tuple[int, int]]()
    for kind, given in zip(kinds, pixels, strict=True):
        item = recipe.preprocess(config, given)
        number = sum(each.kind == kind for each in items)
        items.append(room_for(item, number, recipe.num_tokens(config, item)))
        outer = kind == "image" or layout is None
        before, after = ("<|vision_start|>", "<|vision_end|>") if outer else ("", "")
        # Tokenised by itself, whatever stands around it.
        wanted += tokenizer(f"a {kind}:{before}", add_special_tokens=False)["input_ids"]
        own = tokenizer(their_text(item, given), add_special_tokens=False)["input_ids"]
        rooms.append((len(wanted), len(own)))
        wanted += own + tokenizer(after, add_special_tokens=False)["input_ids"]
    wanted += tokenizer("what?", add_special_tokens=False)["input_ids"]
    found = made.expand(marked, items, LIMITS)
    assert list(found.ids) == wanted
    assert [(room.offset, room.length) for room in found.placeholders] == rooms
    assert [room.num_embeds for room in found.placeholders] == [item.num_rows for item in items]


def test_an_items_text_never_merges_with_its_neighbours() -> None:
    """The recorded tokenizer has merges; text before the first timestamp would take its first sign in."""
    merging = Checkpoint.open(FOLDER / "e2e_qwen3_vl" / "checkpoint")
    recipe, config, made = prompter(merging, "bare")
    tokenizer = CheckpointTokenizer(merging)
    film = torch.zeros((4, 32, 32, 3), dtype=torch.uint8)
    pixels = Pixels(kind="video", frames=film, frames_per_second=2.0)
    item = recipe.preprocess(config, pixels)
    for before in ("seconds", "<", "0.", "the video ", "\n"):
        text = f"{before}<|vision_start|><|video_pad|><|vision_end|>seconds"
        marked = made.mark(Request(raw_prompt=text, videos=[pixels]), LIMITS)
        known = room_for(item, 0, recipe.num_tokens(config, item))
        found = made.expand(marked, [known], LIMITS)
        parts = (before, made.rule.expand(config, known), "seconds")
        apart = [token for part in parts for token in tokenizer.encode(part, add_special=False).ids]
        assert list(found.ids) == apart
