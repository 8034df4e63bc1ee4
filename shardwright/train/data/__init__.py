"""Batches of a job: their order, their shapes, and the position in them."""
