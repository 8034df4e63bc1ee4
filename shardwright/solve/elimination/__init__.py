"""Search problems and their exact solution by elimination."""
