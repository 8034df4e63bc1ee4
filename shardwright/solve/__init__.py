"""Mathematics of the search on tables and trees; knows no plan, mesh or torch."""
