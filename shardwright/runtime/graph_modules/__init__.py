"""Builds fx graph modules from lists of instructions, and runs opaque modules."""
