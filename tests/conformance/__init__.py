"""Wrong servers for the conformance suite."""
