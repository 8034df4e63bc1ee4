"""Renders steps as Chrome traces, and reads the traces of profilers."""
