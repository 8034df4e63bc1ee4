"""Measures devices and links, fits a machine to the samples, times operators, checks a host."""
