"""SoyBean's k-cut: a plan of least communication, for comparison."""
