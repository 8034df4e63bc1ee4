"""The written rules of operators, in index notation."""
