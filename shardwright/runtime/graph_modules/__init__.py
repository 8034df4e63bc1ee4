"""fx graph modules of lists of operators, and modules that are kept whole."""
