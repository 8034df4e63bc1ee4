"""Machines: their devices and links, the presets, and where their figures come from."""
