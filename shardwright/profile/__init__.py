"""Measures a host's devices and links, and fits a machine to the samples."""
