"""One handle: what it publishes, serves and asks for."""
