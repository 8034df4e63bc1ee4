"""One folder per claim; each has a command that measures it and a JSON result."""
