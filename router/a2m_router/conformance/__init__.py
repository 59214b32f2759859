"""Does a server keep A2M 0.1? `python -m a2m_router.conformance --stdio CMD...` or `--http URL` says so, check by
check.

It judges any server, whatever it is written in: it knows the specification and nothing of the server, and it needs the
standard library only. What it writes it forgets again; still, point it at a server that is there for tests: the width
of its vectors may be fixed by the first one it is given, what it writes takes room, and memory/consolidate is called.
A server on stdio that dies is started anew, so that a death fails one check.
"""
