"""Authentication over HTTP, the rights of principals, and readiness."""
