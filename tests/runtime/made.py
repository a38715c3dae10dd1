"""Pictures, videos and questions for tests, from seeds."""

from __future__ import annotations

import torch

from vlexport.specs import Pixels

START = "<|im_start|>user\n"
END = "<|im_end|>\n<|im_start|>assistant\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def image(seed: int, height: int = 56, width: int = 84) -> Pixels:
    """Noise of that size."""
    return Pixels(kind="image", frames=_noise(seed, 1, height, width))


def video(seed: int, frames: int = 8, height: int = 56, width: int = 84, fps: float = 2.0) -> Pixels:
    """Noise that changes from frame to frame."""
    return Pixels(kind="video", frames=_noise(seed, frames, height, width), frames_per_second=fps)


def _noise(seed: int, *shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=random)


def prompt(*parts: str) -> str:
    """A user's turn of these parts, up to where the answer begins."""
    return START + "".join(parts) + END
