"""The tiny trained checkpoint: its training, the held-out questions, and what it answers."""
