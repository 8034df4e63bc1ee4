"""Runs the regions of a step program forward and backward."""
