"""Renders plans and frontiers as text, HTML, SVG and traces: pure functions, without torch."""
