"""a2m: a small client on the command line, for any A2M server."""
