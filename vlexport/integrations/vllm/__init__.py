"""Interfaces of vLLM: pruning in chunked prefill, packed embeddings."""
