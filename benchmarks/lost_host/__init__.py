"""A job goes on when one of its two hosts is lost, and when it comes back."""
