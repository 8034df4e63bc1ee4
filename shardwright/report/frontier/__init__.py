"""Renders a frontier as a table, a chart or a picture."""
