"""Whole clusters in the simulator: peers with all their protocols, tensors, pulls and users."""
