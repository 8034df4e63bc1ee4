"""Published training setups beside the best uniform strategies."""
