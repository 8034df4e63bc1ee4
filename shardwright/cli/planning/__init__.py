"""From TARGET and MACHINE to a captured graph, a frontier and a choice."""
