"""The same protocol code under a virtual clock and a seeded network."""
