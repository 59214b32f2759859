"""One file for each family of memory/*: between the protocol and the rooms below."""
