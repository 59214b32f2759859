"""Where every record lives, and what it has earned."""
