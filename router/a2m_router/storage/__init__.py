"""One durable SQLite file."""
