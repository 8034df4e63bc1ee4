"""How long the search takes, how it grows, and how far from the optimum it may be."""
