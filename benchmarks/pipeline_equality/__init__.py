"""Pipelines of every schedule give what one device gives."""
