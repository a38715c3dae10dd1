"""Adapters for other systems, one package each."""
