"""The messages and values of A2M; pure functions."""
