"""Calling A2M servers."""
