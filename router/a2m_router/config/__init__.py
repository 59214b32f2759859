"""Reading and checking federation.toml; the result is frozen settings."""
