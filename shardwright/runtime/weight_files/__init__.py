"""Reads and writes the weights of a model in files, each rank its own tiles."""
