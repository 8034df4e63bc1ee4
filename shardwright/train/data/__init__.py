"""Reads the batches of a job in order, fits their shapes, and saves the position in them."""
