"""Readers: the keys of one framework's config as a strategy, a batch and what changes results."""
