"""Random numbers that do not depend on the plan."""
