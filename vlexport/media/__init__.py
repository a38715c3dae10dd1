"""Media in: images and videos from files, bytes, arrays and tensors to uint8 RGB frames, within limits.

A source that cannot be read is a `MediaError`; one that could be but exceeds a limit is a `LimitError`,
raised from headers, before memory is taken. Nothing is fetched from a network.
"""

from vlexport.media.images import read_image
from vlexport.media.kinds import kind_of
from vlexport.media.limits import DEFAULT_LIMITS, MediaLimits
from vlexport.media.pipes import piped_frames
from vlexport.media.sampling import Sampling
from vlexport.media.videos import read_video, video_frames

__all__ = [
    "DEFAULT_LIMITS",
    "MediaLimits",
    "Sampling",
    "kind_of",
    "piped_frames",
    "read_image",
    "read_video",
    "video_frames",
]
