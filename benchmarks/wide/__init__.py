"""Long sequences and mixtures of experts: what splitting them gives."""
