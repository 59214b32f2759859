"""Running a router: wiring, start, stop, authentication, checks."""
