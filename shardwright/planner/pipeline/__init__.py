"""Searches for pipelines: stage cuts, schedules and the meshes of device groups."""
