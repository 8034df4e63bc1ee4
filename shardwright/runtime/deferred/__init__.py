"""Builds modules without memory for their tensors, and computes tiles of these afterwards."""
