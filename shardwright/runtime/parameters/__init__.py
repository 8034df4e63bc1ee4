"""Sharded storage of parameters, their all-gathers, gradients and state dicts."""
