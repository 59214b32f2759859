"""Backups of a federation, made while it serves."""
