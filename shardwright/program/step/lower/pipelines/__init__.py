"""Lowers the stages of pipeline groups, and their messages, to step programs."""
