"""Running a router: wiring, start, stop, doors, checks."""
