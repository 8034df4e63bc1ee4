"""Compares a plan on ranks with the module itself."""
