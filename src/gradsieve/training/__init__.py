"""Training runs: configuration, workers, loop, checkpoints, records."""
