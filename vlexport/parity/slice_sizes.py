"""L0 of the sizes of a sliced tower: config.json read a second time, because the reference takes ours."""

from __future__ import annotations

from collections.abc import Mapping

from vlexport.parity.tables import Finding
from vlexport.vision.slice_tower import TowerSizes

# Of towers that say nothing about it, as transformers has it for them too.
EPS = 1e-6


def check_sizes(config: Mapping[str, object], sizes: TowerSizes) -> list[Finding]:
    """Every size that config.json names; a checkpoint may leave those of a published tower out."""
    named = config.get("vision_config")
    vision: Mapping[str, object] = named if isinstance(named, Mapping) else {}
    wanted: dict[str, object] = {
        field: vision[key]
        for field, key in (
            ("width", "hidden_size"),
            ("heads", "num_attention_heads"),
            ("inner", "intermediate_size"),
            ("patch", "patch_size"),
        )
        if key in vision
    }
    if "num_hidden_layers" in vision:
        wanted["depth"] = int(str(vision["num_hidden_layers"])) - bool(config.get("drop_vision_last_layer"))
    if {"image_size", "patch_size"} <= set(vision):
        wanted["side"] = int(str(vision["image_size"])) // int(str(vision["patch_size"]))
    wanted |= {
        "eps": vision.get("layer_norm_eps", EPS),
        "queries": config.get("query_num"),
        "out_width": config.get("hidden_size"),
    }
    wrong = [name for name, value in wanted.items() if getattr(sizes, name) != value]
    first = f"{wrong[0]} is {getattr(sizes, wrong[0])}, not {wanted[wrong[0]]}" if wrong else ""
    return [Finding(table="sizes", wrong=len(wrong), first=first)]
