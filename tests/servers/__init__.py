"""A2M servers that stand for third-party ones in the tests: any store with the protocol's five methods.

They are written from the specification alone and share no code with `router` or `backends`. They need only the standard
library, and no environment: each runs as a script.
"""
