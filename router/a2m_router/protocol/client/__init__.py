"""Calling an A2M server."""
