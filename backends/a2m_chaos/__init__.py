"""a2m-chaos: any A2M server, misbehaving on a schedule."""
