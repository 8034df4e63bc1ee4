"""Runs collectives on each backend, and tunes CPU hosts on request."""
