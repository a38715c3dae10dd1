"""Questions from the terminal about what a webcam sees, while it sees it. An empty line ends it.

pip install opencv-python-headless
python examples/watch_webcam.py BUNDLE CHECKPOINT [CAMERA]
"""

import sys
import threading
import time

import vlexport

try:
    import cv2
except ImportError:
    sys.exit("OpenCV reads the camera: pip install opencv-python-headless")

OPTIONS = {"fps": 2, "prune": 0.5, "method": "delta-frames", "behind": "drop", "keep": "newest"}


def ask(stream, ended):
    """Answer each line that is typed, as its tokens come."""
    for line in map(str.strip, sys.stdin):
        if not line or ended.is_set():
            break
        try:
            for piece in stream.stream(line, max_new_tokens=64):
                print(piece.text, end="", flush=True)
            print(f"  ({stream.counts.taken} frames)")
        except vlexport.VlexportError as error:
            print(error, file=sys.stderr)
    ended.set()


def main(bundle, checkpoint, camera="0"):
    """Push the camera's frames until there is no more to ask, or no more to see."""
    capture, ended = cv2.VideoCapture(int(camera) if camera.isdigit() else camera), threading.Event()
    if not capture.isOpened():
        sys.exit(f"camera {camera}: not opened. Name another one, or the path of a film.")
    with vlexport.load(bundle, checkpoint=checkpoint) as pipeline, pipeline.watch(**OPTIONS) as stream:
        threading.Thread(target=ask, args=(stream, ended), daemon=True).start()
        while not ended.is_set():
            is_there, frame = capture.read()
            if not is_there:
                break
            try:
                stream.push(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), time.monotonic())
            except vlexport.VlexportError as error:
                print(error, file=sys.stderr)
        ended.set()
    capture.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
