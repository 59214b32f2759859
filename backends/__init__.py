"""A2M servers that come with a2m-router: tiers of their own, reached by the protocol alone."""
