"""Being an A2M server."""
