"""Runs a step program on one rank."""
