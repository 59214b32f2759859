"""a2m-chaos: a proxy that makes any A2M server misbehave on a schedule."""
