"""From a graph and a machine to the frontier of plans."""
