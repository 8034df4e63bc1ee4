"""Pipelines: the module that runs this rank's stages, and what asynchronous ones are made of."""
