"""Kernels of operators that work in chunks: the loss and the MLP."""
