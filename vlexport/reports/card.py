"""The card of a bundle, `card.md`: a page for a model repository, written by its build and hashed with it."""

from __future__ import annotations

import re
from pathlib import Path

from vlexport.bundle import Manifest, command
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.source import open_inside
from vlexport.errors import CheckpointError
from vlexport.parity.report import WORDS
from vlexport.reports.facts import BundleFacts

CARD = "card.md"
# A licence as model cards name it, in the header of the checkpoint's own card.
_HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9][A-Za-z0-9.+-]{0,63})['\"]?[ \t]*\r?$", re.MULTILINE)
_MAX_HEADER = 1 << 16
PAGE = """---
{header}
---

# {bundle}

The vision tower of `{model}` as an engine of {backend} in {precision}, made by vlexport: from
images and videos to the embeddings that the language model takes.

## Use

```bash
{check}
{encode}
```

```python
import vlexport

with vlexport.load("{bundle}") as pipeline:
    (photo,) = pipeline.encode(["photo.jpg"])
```

An engine is a program. One that was built elsewhere is refused until its digest, which `vlexport inspect`
prints, is approved: `vlexport trust BUNDLE DIGEST`. Do so only if you trust who built it, and have the digest
from them.

## Accuracy, against the model's own implementation with the same weights

{accuracy}

## Sizes of a call, profile `{profile}`

| size | smallest | usual | largest |
|---|---|---|---|
{sizes}

## Provenance

| | |
|---|---|
{rows}

## Licence

The weights are those of the checkpoint: its licence applies to them. {named}
"""


def licence_of(checkpoint: Checkpoint) -> str | None:
    """Return the licence that the card of a checkpoint names; None without a card or a name."""
    try:
        with open_inside(checkpoint.path, "README.md") as file:
            text = file.read(_MAX_HEADER).decode("utf-8", errors="replace")
    except CheckpointError:
        return None
    header = _HEADER.match(text)
    licence = _LICENCE.search(header[1]) if header else None
    return licence[1] if licence else None


def card(manifest: Manifest, name: str, licence: str | None) -> str:
    """Return the card of a bundle: what it is, how to load it, how exact it is, its sizes and origin."""
    facts = BundleFacts.built(manifest, manifest.parity)
    origin, precision = manifest.checkpoint, manifest.precision.name
    model, bundle = plain(origin.name), plain(name)
    source, _, commit = origin.source.partition("@")
    header = {
        "library_name": "vlexport",
        "base_model": plain(source) if commit and commit == origin.revision else None,
        "base_model_relation": "quantized" if manifest.precision.quantisation else None,
        "license": licence,
        "pipeline_tag": "image-feature-extraction",
        "tags": f"[vlexport, {manifest.target.backend}, {plain(manifest.recipe.name)}]",
    }
    sizes = "\n".join(
        f"| {size} | {bounds.min:,} | {bounds.opt:,} | {bounds.max:,} |"
        for size, bounds in manifest.profile.ranges.items()
    )
    accuracy = f"{WORDS.get(facts.status, facts.status)}."
    if facts.report:
        table = "\n".join(map(plain, facts.report.table().splitlines()))
        accuracy = f"{plain(facts.summary)}\n\n```\n{table}\n```"
    if manifest.proof.calls:
        run = command(Path(bundle), manifest, "check", "--run")
        accuracy += (
            f"\n\nIt proves itself without the checkpoint: `{run}` runs {len(manifest.proof.calls)} stored "
            f"calls, which passed on {plain(manifest.proof.machine)}."
        )
    named = f"It names the licence `{licence}`." if licence else "It names no licence that could be read."
    photo = ("--image", "photo.jpg", "--output", "features.safetensors")
    return PAGE.format(
        header=_lines(header, "{}: {}"),
        bundle=bundle,
        model=model,
        backend=manifest.target.backend,
        precision=precision,
        check=command(Path(bundle), manifest, "check"),
        encode=command(Path(bundle), manifest, "encode", *photo),
        accuracy=accuracy,
        profile=plain(manifest.profile.name),
        sizes=sizes,
        rows=_lines(_provenance(manifest), "| {} | `{}` |"),
        named=named,
    )


def _provenance(manifest: Manifest) -> dict[str, str | None]:
    origin = manifest.checkpoint
    return {
        "checkpoint": plain(origin.name),
        "adapter": plain(origin.adapter.name) if origin.adapter else None,
        "weights (SHA-256)": origin.weights,
        "recipe": plain(manifest.recipe.name),
        "backend": manifest.target.backend,
        "precision": manifest.precision.name,
        "pruning": manifest.graphs.selector,
        "target": plain(manifest.target.tag),
        "key": manifest.key,
        "created": manifest.created,
        "versions": ", ".join(f"{plain(name)} {plain(number)}" for name, number in manifest.versions.items()),
    }


def plain(text: str) -> str:
    """Return a text without what would end a cell or a code span."""
    return "".join(sign if sign.isprintable() and sign not in "`|<>" else "?" for sign in text)


def _lines(values: dict[str, str | None], form: str) -> str:
    return "\n".join(form.format(key, value) for key, value in values.items() if value is not None)
