"""Positions of prompts with media, before and after pruning, and splicing of embeddings."""
