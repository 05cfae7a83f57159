"""What a pull did, in words: which sources were considered, what each gave, why others did not."""

from __future__ import annotations

from tensorhub_p2p.results import Pull, SourceReport

RATED_FROM = 32 << 20
"""Bytes from which on a source's rate means something."""


def explain(pull: Pull) -> str:
    """One line for the pull, one for each source, and one for each thing that went wrong."""
    if pull.up_to_date:
        return f"version {pull.version} of {pull.model!r} was held already: nothing moved"
    lines = [
        f"version {pull.version} of {pull.model!r} (epoch {pull.epoch}): "
        f"{pull.bytes / 1e6:.1f} MB in {pull.seconds:.3f} s "
        f"(waiting {pull.waiting:.3f}, registering {pull.registering:.3f}, "
        f"moving {pull.moving:.3f}, verifying {pull.verifying:.3f}), "
        f"{pull.retried} chunks fetched again"
    ]
    for source in pull.sources:
        lines.append(f"  {source.name} ({source.peer_id}) {source.slot}: {_gave(source)}")
        lines.extend(f"    - {note}" for note in source.notes)
    return "\n".join(lines)


def _gave(source: SourceReport) -> str:
    where = "same " + source.locality if source.locality != "far" else "another zone"
    if not source.bytes:
        needed = "nothing was needed of it" if not source.notes else "gave nothing"
        return f"{needed} ({where}; {source.state})"
    rate = f" at {source.rate / 1e9:.2f} GB/s" if source.rate and source.bytes >= RATED_FROM else ""
    return (
        f"{source.bytes / 1e6:.1f} MB in {source.chunks} chunks over {source.transport}{rate} "
        f"({where}; {source.state})"
    )
