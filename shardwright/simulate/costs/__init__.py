"""Cost functions of single operators, collectives and updates."""
