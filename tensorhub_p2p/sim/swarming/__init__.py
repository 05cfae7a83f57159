"""Whole swarms on limited links under a virtual clock."""
