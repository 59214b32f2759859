"""Reading: one question is sent to several tiers at once, and their results become one answer."""
