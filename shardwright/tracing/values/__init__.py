"""Sizes and decisions that a model takes from the values of its inputs."""
