"""Checks whether a server conforms to A2M 0.1: `python -m a2m_router.conformance --stdio CMD...` or `--http URL`.

It tests any server, in any language, by the specification alone, and needs only the standard library. It forgets the
records that it writes. Nevertheless, use it on a test server: the first vector may fix the width of all vectors, the
records take space, and memory/consolidate is called. A server on stdio that dies is restarted, so that a death fails
only one check.
"""
