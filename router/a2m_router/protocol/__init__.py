"""A2M: its bytes and values, calling a server, and being one."""
