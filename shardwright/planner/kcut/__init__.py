"""SoyBean's k-cut: the plan of least communication volume, for comparison."""
