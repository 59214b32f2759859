"""A2M servers that stand in the tests for other people's: any store with the protocol's five methods.

They are written from the specification alone and share no code with `router` or `backends`; they need the standard
library only, and no environment: each runs as a script.
"""
