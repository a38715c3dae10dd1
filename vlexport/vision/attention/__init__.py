"""Attention inside segments: one declaration of them, three layouts, for all families."""
