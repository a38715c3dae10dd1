"""Model families, one Python file each: `name.py` defines `RECIPE`. Installed as `vlexport.recipes`."""
