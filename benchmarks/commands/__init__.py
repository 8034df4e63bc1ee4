"""Wall time of whole commands, of this commit and of an earlier one."""
