"""Runs parallel programs on ranks with plain `torch.distributed`."""
