"""Predicted against measured step time of pipelines under every synchronous schedule."""
