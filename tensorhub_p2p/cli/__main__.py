"""`python -m tensorhub_p2p.cli`: the same as the script `tensorhub-p2p`."""

from __future__ import annotations

from tensorhub_p2p.cli import main

if __name__ == "__main__":
    main()
