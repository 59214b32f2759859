"""Reading what is left of an earlier catalog, and swapping its file for a new one."""
