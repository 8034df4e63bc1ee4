"""What a strategy costs, what single changes of it would buy, and the best strategies beside it."""
