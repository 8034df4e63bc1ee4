"""Searches for pipeline stages, schedules and their meshes."""
