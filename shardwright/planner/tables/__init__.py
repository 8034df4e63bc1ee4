"""Cost tables of tilings, layouts and edges, which the search adds up."""
