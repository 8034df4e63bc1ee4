"""Compile time by number of layers: equal layers are one compiled function."""
