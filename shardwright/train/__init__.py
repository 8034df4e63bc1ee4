"""Train: jobs, the loop that trains them on ranks, and how the ranks are started."""
