"""The bytes and values of A2M; pure."""
