"""Ranking candidates into one order; pure functions."""
