"""A page that shows which tokens of a video pruning keeps, at several rates. One file, no script, no server.

python examples/kept_page.py BUNDLE clip.mp4 kept.html
"""

import base64
import html
import io
import sys
from pathlib import Path

import torch

import vlexport
from vlexport.media import read_video
from vlexport.report.overlay import Film, contact_sheet

RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Kept tokens</title>
<style>
body {{ background: #16181d; color: #e8eaee; font: 16px sans-serif; margin: 2em }}
section {{ display: none }} img {{ display: block; max-width: 100% }} label {{ margin-right: 1em }}
{rules}
</style><h1>{name}</h1><p>Grey, dark cells are tokens that pruning drops; the first frame stays whole.</p>
{inputs}{sections}</html>
"""


INPUT = '<input type="radio" name="rate" id="r{at}"{checked}><label for="r{at}">{rate:.0%}</label>\n'
SECTION = '<section id="s{at}"><img alt="{title}" src="data:image/png;base64,{picture}"></section>\n'
RULE = "body:has(#r{at}:checked) #s{at} {{ display: block }}\n"


def main(bundle, video, out):
    """Encode the video at every rate and write the page."""
    pixels, inputs, sections, rules = read_video(video, fps=2), "", "", ""
    with vlexport.load(bundle) as pipeline:
        merge = pipeline.recipe.merge(pipeline.config)
        for at, rate in enumerate(RATES):
            encoded = pipeline.encode(pixels, prune=rate)
            frames, rows, columns = encoded.grid
            kept = torch.ones(frames, rows // merge, columns // merge, dtype=torch.bool)
            if encoded.mask is not None:
                kept = encoded.mask.reshape(kept.shape)
            title = f"rate {rate:.0%}: {len(encoded.embeds)} of {kept.numel()} tokens kept"
            file = io.BytesIO()
            contact_sheet([Film(title=title, frames=pixels.frames, kept=kept)]).save(file, "PNG")
            picture = base64.b64encode(file.getvalue()).decode()
            inputs += INPUT.format(at=at, rate=rate, checked=" checked" if rate == 0.5 else "")
            sections += SECTION.format(at=at, title=title, picture=picture)
            rules += RULE.format(at=at)
    page = PAGE.format(name=html.escape(Path(video).name), rules=rules, inputs=inputs, sections=sections)
    Path(out).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
