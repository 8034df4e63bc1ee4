"""`Strategy`: one uniform way to train, as a value and as a line of text."""
