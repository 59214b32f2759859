"""Text from records: prompts and summaries."""
