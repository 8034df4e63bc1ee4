"""Search problems with repeats, solved once per distinct copy."""
