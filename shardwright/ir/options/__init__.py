"""User options of a plan: numerics, precision, optimizer, constraints, options of the search."""
