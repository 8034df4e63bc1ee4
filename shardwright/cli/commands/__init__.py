"""One file for every command."""
