"""Tiny random checkpoints, one file per recipe: `contents()` gives what the demo and the tests write."""
