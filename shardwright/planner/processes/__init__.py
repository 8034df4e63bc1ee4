"""Search in several processes, with the results of one."""
