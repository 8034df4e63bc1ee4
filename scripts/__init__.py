"""What the project does with itself: checks, pages and pictures made from its code."""
