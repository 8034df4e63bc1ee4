"""How fast asynchronous pipelines are beside data parallelism and flushing pipelines."""
