"""Measurements of the library against other implementations, and the pages that are written from them."""
