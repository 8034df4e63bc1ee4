"""Writes and reads checkpoints and the state of a run."""
