"""Tiny random checkpoints, one file per recipe: `contents()` gives what the demo and the tests write."""

# What `vlexport demo` shows if nobody names a recipe.
DEFAULT_RECIPE = "qwen2_5_vl"
