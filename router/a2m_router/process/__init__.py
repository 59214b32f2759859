"""What a program needs of its process: standard streams, terminal, paths, and time."""
