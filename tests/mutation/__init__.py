"""Planted bugs: small patches of the library's own sources, and the program that shows which check sees each.

python -m tests.mutation
"""
