"""`make gpu`: one run on one GPU, step by step, each in a process of its own. See docs/gpu.md."""
