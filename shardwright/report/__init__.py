"""Report: plans and frontiers as text. Pure functions of what floor 1 holds; no torch, no files."""
