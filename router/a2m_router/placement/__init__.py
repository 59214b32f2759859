"""Changing where records live, and finishing each change after any crash."""
