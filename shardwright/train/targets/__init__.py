"""Resolves TARGET of the command line to a job."""
