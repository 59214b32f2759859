"""The a2m command."""
