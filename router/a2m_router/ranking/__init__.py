"""Candidates in, one order out; pure."""
