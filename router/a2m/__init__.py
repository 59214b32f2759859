"""The language: records, errors, capabilities, the JSON-RPC codec and both ends of the bindings."""
