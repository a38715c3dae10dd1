"""Runs bundles: packing media for an engine, stitching its output into a decoder, and the state of both."""
