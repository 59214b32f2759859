"""a2m-rag: serves an existing retrieval service as a read-only A2M server."""
