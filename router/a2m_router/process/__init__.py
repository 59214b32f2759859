"""What a program uses of its process: standard streams, terminal, paths and time."""
