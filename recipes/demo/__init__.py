"""Tiny random checkpoints, one file per recipe: `contents()` gives all by the sizes of a `Tiny`."""

# What `vlexport demo` shows if nobody names a recipe.
DEFAULT_RECIPE = "qwen2_5_vl"
