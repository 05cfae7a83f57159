"""Which chunk comes from whom: the swarm of one pull, and its sources' side."""
