"""A training run: its workspace, one step, the loop, validation."""
