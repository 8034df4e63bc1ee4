"""Pipelines: the module that runs this rank's stages, and stages of asynchronous pipelines."""
