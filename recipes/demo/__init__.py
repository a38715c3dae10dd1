"""Tiny random checkpoints, one file per recipe: `contents()` gives what the demo and the tests write.

A family states its config and a tree of its tensors, both from the sizes in its `Tiny`.
"""

# What `vlexport demo` shows if nobody names a recipe.
DEFAULT_RECIPE = "qwen2_5_vl"
