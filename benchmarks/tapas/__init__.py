"""Search time against depth and width, folded and unfolded, and against an integer program."""
