"""What a pull did, in words: which sources were considered, what each gave, why others did not."""

from __future__ import annotations

from tensorhub_p2p.results import MEMORY, Pull, SourceReport, TransportReport

RATED_FROM = 32 << 20
"""Bytes from which on a rate means something."""
WHERE = {
    "memory": "in this process's memory",
    "host": "same host",
    "rack": "same rack",
    "zone": "same zone",
    "far": "another zone",
}


def explain(pull: Pull) -> str:
    """A few lines for the pull, one for each source, and one for each thing that it met there."""
    if pull.up_to_date:
        return f"version {pull.version} of {pull.model!r} was held already: nothing moved"
    lines = [
        f"version {pull.version} of {pull.model!r} (epoch {pull.epoch}): "
        f"{_size(pull.bytes)} in {pull.seconds:.3f} s "
        f"(waiting {pull.waiting:.3f}, registering {pull.registering:.3f}, "
        f"moving {pull.moving:.3f}; verifying took {pull.verifying:.3f} s of the readers' time)",
        f"  {_brought(pull)}; {pull.retried} chunks fetched again",
    ]
    for source in pull.sources:
        lines.append(f"  {source.name} ({source.peer_id}) {source.slot}: {_gave(source)}")
        lines.extend(f"    - {line}" for line in _met(source))
    return "\n".join(lines)


def _brought(pull: Pull) -> str:
    parts = [_over(report) for report in pull.transports]
    return ", ".join(parts) if parts else "nothing was moved"


def _over(report: TransportReport) -> str:
    rated = report.rate and report.bytes >= RATED_FROM
    rate = f" at {(report.rate or 0.0) / 1e9:.2f} GB/s a reader" if rated else ""
    if report.transport == MEMORY:
        return f"{_size(report.bytes)} were prefetched, and copied{rate}"
    return f"{_size(report.bytes)} over {report.transport}{rate}"


def _gave(source: SourceReport) -> str:
    where = WHERE[source.locality]
    if not source.bytes:
        return f"{source.verdict}: {source.why} ({where}; {source.state})"
    rate = f" at {source.rate / 1e9:.2f} GB/s" if source.rate and source.bytes >= RATED_FROM else ""
    over = " and ".join(report.transport for report in source.transports)
    return (
        f"{_size(source.bytes)} in {source.chunks} chunks over {over}{rate}: "
        f"{source.why} ({where}; {source.state})"
    )


def _met(source: SourceReport) -> list[str]:
    lines = [f"{transport} not used: {why}" for transport, why in source.unfit.items()]
    for fallback in source.fallbacks:
        instead = f"{fallback.instead} took over" if fallback.instead else "no other was left"
        lines.append(f"{fallback.transport} failed, {instead}: {fallback.why}")
    if len(source.transports) > 1:
        lines.append("it brought " + ", ".join(map(_over, source.transports)))
    return [*lines, *(note for note in source.notes if note not in {source.why, source.state})]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
