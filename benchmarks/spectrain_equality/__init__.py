"""Asynchronous pipelines on ranks are bit for bit what is simulated in one process."""
