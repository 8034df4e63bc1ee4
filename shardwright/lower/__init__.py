"""From a graph and a plan to what one rank runs: local shapes, explicit redistributions."""
