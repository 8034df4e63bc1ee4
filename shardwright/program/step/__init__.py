"""Step programs: the whole step of one rank as a list of instructions."""
