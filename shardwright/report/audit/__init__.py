"""Renders configs of other frameworks: what was read, its price, and what changes of it buy."""
