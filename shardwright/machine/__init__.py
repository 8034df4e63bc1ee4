"""Machines: their devices and links, the presets, and machine files in TOML."""
