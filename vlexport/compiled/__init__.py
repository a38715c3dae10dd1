"""What stays torch: pruning and positions, compiled beside an engine and never inside it."""
