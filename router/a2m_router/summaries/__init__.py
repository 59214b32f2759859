"""Text out of records."""
