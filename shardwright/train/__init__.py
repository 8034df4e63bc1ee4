"""Trains jobs: their declaration, the training loop of a rank, and the start of the ranks."""
