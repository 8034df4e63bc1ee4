"""Prices a strategy, single changes of it, and the best other uniform strategies."""
