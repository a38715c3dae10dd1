"""Contenders against each other, one at a time in interleaved rounds, and what others' exporters return."""
