"""Every moment at which something may die: see `points`."""
