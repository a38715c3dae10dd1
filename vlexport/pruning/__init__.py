"""Choose which tokens of a video to keep; stays a torch graph, outside the engine."""
