"""Measurements of a bundle beside its accuracy check: answers to a task, pruning sweeps, times of calls."""
