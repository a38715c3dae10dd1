"""transformers' own vision classes as towers: the generic recipe's packing, pixels, classes and tracing."""
