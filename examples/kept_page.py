"""A Gradio page that shows which tokens of a video pruning keeps.

pip install gradio
python examples/kept_page.py BUNDLE
"""

import sys
from pathlib import Path

import gradio as gr
import torch

import vlexport
from vlexport.media import kind_of, read_video
from vlexport.reports.overlay import Film, contact_sheet

# Fonts of the reader's machine; the usual theme loads some from the network.
LAUNCH = {"theme": gr.themes.Default(font="sans-serif", font_mono="monospace")}


def page(pipeline):
    """Return the page of a loaded bundle."""
    pipeline.pruner.check(0.5)  # some families have nothing to prune
    merge = pipeline.recipe.merge(pipeline.config)

    def encode(files):
        """Encode a video, or images as its frames in the order of their names, two a second."""
        if not files:
            return None
        try:
            frames = sorted(files, key=lambda file: Path(file).name)
            pixels = read_video(frames if kind_of(frames[0]) == "image" else frames[0], fps=2)
            return pixels.frames, pipeline.encode(pixels)
        except vlexport.VlexportError as error:
            words = str(error).replace(f"{Path(files[0]).parent}/", "")
            raise gr.Error(words, duration=None, print_exception=False) from error

    def draw(clip, rate):
        """Prune what was encoded once, and draw what is left."""
        if clip is None:
            return None, ""
        frames, encoded = clip
        pruned = pipeline.pruner.prune(encoded, rate, pipeline.pruner.selector(None))
        times, rows, columns = encoded.grid
        kept = torch.ones(times, rows // merge, columns // merge, dtype=torch.bool)
        if pruned.mask is not None:
            kept = pruned.mask.reshape(kept.shape)
        words = f"{len(pruned.embeds)} of {kept.numel()} tokens kept at rate {rate:g}"
        film = Film(title=words, frames=frames, kept=kept, seconds_per_grid=encoded.seconds_per_grid)
        return contact_sheet([film]), words

    with gr.Blocks(title="Kept tokens", analytics_enabled=False) as made:
        gr.Markdown("# What pruning keeps\nDimmed cells are tokens that pruning drops.")
        with gr.Row():
            files = gr.File(label="A video, or images as its frames", file_count="multiple", height=140)
            rate = gr.Slider(0, 0.95, value=0.5, step=0.05, label="Pruning rate")
        words = gr.Textbox(label="Kept", interactive=False)
        sheet = gr.Image(
            label="Frames",
            show_label=False,
            format="png",
            interactive=False,
            buttons=["download", "fullscreen"],
        )
        clip = gr.State()
        files.change(encode, files, clip).success(draw, [clip, rate], [sheet, words])
        rate.change(draw, [clip, rate], [sheet, words], trigger_mode="always_last")
    return made


if __name__ == "__main__":
    with vlexport.load(sys.argv[1]) as opened:
        page(opened).launch(**LAUNCH)
