"""Who may call a router over HTTP, and what they may do."""
