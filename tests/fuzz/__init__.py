"""Coverage-guided fuzzing of what strangers' bytes meet first; `python -m tests.fuzz --help`."""
