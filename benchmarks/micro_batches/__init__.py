"""Step time in micro-batches with sharded parameters on slow links, against an earlier commit."""
