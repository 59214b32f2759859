"""a2m-rag: an existing retrieval service as a read-only A2M server."""
