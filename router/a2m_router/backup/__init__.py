"""TierGateway of a federation, made while it serves."""
