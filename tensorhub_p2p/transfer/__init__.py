"""How bytes move: memory, digests, credentials and the transports. Decides nothing."""
