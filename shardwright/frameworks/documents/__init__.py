"""Config files as text with positions: keys, values, line numbers, and edits of single values."""
