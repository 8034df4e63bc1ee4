"""How far predictions are from what is measured."""
