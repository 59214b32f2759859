"""Reaching servers that are not trusted."""
