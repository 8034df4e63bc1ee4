"""Resolves the command line's TARGET to a job."""
