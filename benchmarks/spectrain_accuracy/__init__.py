"""What asynchronous pipelines do to learning, and how much weight prediction repairs."""
