"""A checkpoint to a bundle. The function has the name `vlexport.build`, so the package has another."""
