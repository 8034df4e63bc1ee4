"""Reads what the command line's TARGET names as a job."""
