"""Prices of a strategy and of single changes of it, and the best strategies beside it."""
