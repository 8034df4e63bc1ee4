"""Finds the rules of unknown operators by experiment."""
