"""federation.toml, checked, as frozen settings."""
