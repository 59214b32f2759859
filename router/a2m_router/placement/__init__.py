"""Changing where records live, and finishing it whatever dies."""
