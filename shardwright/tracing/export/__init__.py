"""Runs `torch.export` on one call, with the patches that it needs to trace all models."""
