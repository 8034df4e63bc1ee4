"""Fewer bytes: SoyBean's k-cut against data parallel, model parallel and joint cuts."""
