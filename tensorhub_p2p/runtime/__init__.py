"""Where the protocols run: one control thread a peer, its sockets, and the real clock."""
