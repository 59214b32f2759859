"""Durable SQLite files: opening, locking, syncing, copying."""
