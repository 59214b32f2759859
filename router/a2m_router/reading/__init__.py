"""One answer out of several tiers: a question, asked of all at once, and what of their answers may be shown."""
