"""Batches of a job: their order, their shapes and the place where one is in them."""
