"""Runs `torch.export` on one call, with what it needs to follow every model."""
