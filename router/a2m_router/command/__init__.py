"""The a2m command: an A2M client on the command line."""
