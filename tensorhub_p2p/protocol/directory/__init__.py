"""Who has what: registers kept by quorums of owners on a ring."""
