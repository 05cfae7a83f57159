"""A run as one picture: an HTML file with a row for each worker, in which nothing is loaded.

Rules of this file. It draws what the journal says, and decides nothing. Times become percentages of
the chart's width, so that the page can be made wider without anything being drawn anew. All text
is escaped by `_tag`, the only one that writes an element. What is about nobody who has a row
goes to the first one, the run's own.

From the back to the front: faults, lives (a thin line, with a gap while the worker is dead), the
versions held, verbs that failed, phases, violations. timeline.html has the looks and the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.history import Call, History, Life, history
from chaos.journal import AnyEvent, Phase
from chaos.stalls import name_of

if TYPE_CHECKING:
    from chaos.checks import Violation

PAGE = Path(__file__).with_name("timeline.html")
ROW, BAR = 30, 16
"""Pixels: of a row (the page says it too), and of the bars at its lower edge."""
COLOURS = 12
MOST_TICKS = 200
RUN = "the run"
BRINGS = frozenset({"publish", "replicate"})
GIVES_UP = frozenset({"unpublish", "close", "close handle"})


def write_timeline(events: Sequence[AnyEvent], violations: Sequence[Violation], path: Path) -> None:
    """`events` in order of time. Raises ValueError if there are none."""
    if not events:
        raise ValueError("no event: there is nothing to draw")
    chart = _Chart(events, violations)
    page = PAGE.read_text(encoding="utf-8")
    # No escaped text holds a "<", so none can pose as one of the page's places.
    for place, parts in (
        ("title", [escape(chart.title)]),
        ("violations", chart.listed()),
        ("names", chart.names()),
        ("axis", chart.axis()),
        ("chart", chart.drawn()),
    ):
        page = page.replace(f"<!--{place}-->", "\n".join(parts))
    path.write_text(page, encoding="utf-8")


def held(life: Life, last: float) -> Iterator[tuple[int, float, float]]:
    """What it held: version, from when, until when.

    A verb that moves the tensors ends it, whatever becomes of the verb; if that failed and left
    the version published, it is held again.
    """
    version, since = -1, None
    for call in life.calls:
        if call.verb not in BRINGS | GIVES_UP:
            continue
        if since is not None:
            yield version, since, call.began
        since = None
        if call.ended is None:
            continue
        if call.succeeded and call.verb in BRINGS:
            version, since = _brought(call), call.ended.at
        elif call.ended.error and call.ended.state == "PUBLISHED" and version >= 0:
            since = call.ended.at
    if since is not None:
        yield version, since, min(life.end, last)


def _brought(call: Call) -> int:
    """`publish` returns nothing: its version is what was asked for."""
    assert call.ended is not None
    asked = call.called.what
    return int(asked) if call.ended.version < 0 and asked.isdigit() else call.ended.version


def _tag(name: str, text: str | None = None, /, **attributes: object) -> str:
    """An element; `kind` is its class, `data_x` its data-x."""
    given = "".join(
        f' {"class" if key == "kind" else key.replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{given}/>" if text is None else f"<{name}{given}>{escape(text)}</{name}>"


def _rows(told: History) -> dict[str, Life]:
    """The first life of each worker, by name: roles in their order, r2 before r10."""
    first: dict[str, Life] = {}
    for life in told.lives.values():
        first.setdefault(name_of(life.who), life)
    roles = list(dict.fromkeys(life.started.role for life in first.values()))

    def place(name: str) -> tuple[int, list[str | int]]:
        parts = re.split(r"(\d+)", name)
        return roles.index(first[name].started.role), [int(p) if p.isdigit() else p for p in parts]

    return {name: first[name] for name in sorted(first, key=place)}


class _Chart:
    """All parts of one page, as elements."""

    def __init__(self, events: Sequence[AnyEvent], violations: Sequence[Violation]) -> None:
        self._told = history(events)
        self._phases = [event for event in events if isinstance(event, Phase)]
        self._violations = violations
        self._began = events[0].at
        self._seconds = max(events[-1].at - self._began, 1e-3)
        self._workers = _rows(self._told)
        self._row_of = {name: row for row, name in enumerate((RUN, *self._workers))}
        self.title = (
            f"{len(self._workers)} workers, {len(self._told.lives)} processes, "
            f"{self._seconds:.1f} s, {len(violations)} violations"
        )

    # --- where things are ---

    def _share(self, seconds: float) -> float:
        return round(100 * seconds / self._seconds, 4)

    def _x(self, at: float) -> str:
        """At an edge, if it is no time of this run."""
        return f"{self._share(min(max(0.0, at - self._began), self._seconds))}%"

    def _y(self, who: str) -> int:
        return ROW * self._row_of.get(name_of(who), 0)

    def _bar_y(self, who: str) -> int:
        return self._y(who) + ROW - BAR - 2

    def _when(self, at: float) -> str:
        return f"{at - self._began:.3f} s"

    # --- around the chart ---

    def listed(self) -> Iterator[str]:
        if not self._violations:
            yield _tag("p", "no violation")
            return
        yield "<ol>"
        for number, violation in enumerate(self._violations):
            place = f"{self._when(violation.at)} {violation.who}"
            link = _tag("a", place, href=f"#violation-{number}")
            said = f"{violation.guarantee}, {violation.check}: {violation.what}"
            yield f"<li>{link} {escape(said)}</li>"
        yield "</ol>"

    def names(self) -> Iterator[str]:
        yield _tag("div", RUN, kind="name")
        for name, life in self._workers.items():
            yield _tag("div", name, kind="name", data_tip=_described(life))

    def axis(self) -> Iterator[str]:
        yield '<svg id="axis">'
        for number, seconds in enumerate(self._ticks()):
            x = f"{self._share(seconds)}%"
            text = _tag("text", f"{seconds:g}", x=x, y=12)
            line = _tag("line", x1=x, x2=x, y1=16, y2=ROW)
            yield f'<g class="tick" data-tick="{number}">{line}{text}</g>'
        for phase in self._phases:
            yield _tag("text", phase.phase, x=self._x(phase.at), dx=3, y=26, kind="phase-name")
        yield "</svg>"

    def _ticks(self) -> Iterator[float]:
        """1, 2 or 5 times a power of ten apart, and not too many."""
        steps = (base * 10.0**power for power in range(-3, 9) for base in (1, 2, 5))
        step = next(step for step in steps if self._seconds / step <= MOST_TICKS)
        for number in range(int(self._seconds / step) + 1):
            yield round(number * step, 3)

    # --- the chart ---

    def drawn(self) -> Iterator[str]:
        height = ROW * len(self._row_of)
        yield f'<svg id="chart" height="{height}">'
        for y in range(ROW, height + 1, ROW):
            yield _tag("line", x1=0, x2="100%", y1=y - 0.5, y2=y - 0.5, kind="row")
        yield from self._faults()
        for life in self._told.lives.values():
            yield self._life(life)
            yield from self._held(life)
            yield from self._failures(life)
        for phase in self._phases:
            x, said = self._x(phase.at), f"{phase.phase} at {self._when(phase.at)}\n{phase.detail}"
            yield _tag("line", x1=x, x2=x, y1=0, y2="100%", kind="phase", data_tip=said)
        yield from self._breaches()
        yield "</svg>"

    def _faults(self) -> Iterator[str]:
        for spell in self._told.spells:
            since, until = spell.begin.at, min(spell.end, self._told.last)
            share = max(self._share(until - since), 0.02)  # one of no length is seen, too
            whom = ", ".join(spell.begin.targets)
            said = f"{spell.kind}: {whom}\n{spell.begin.detail}\n{self._span(since, until)}"
            for y in sorted({self._y(target) for target in spell.begin.targets} or {0}):
                x = self._x(since)
                yield _tag(
                    "rect", x=x, y=y, width=f"{share}%", height=ROW, kind="fault", data_tip=said
                )
                yield _tag("text", spell.kind, x=x, dx=2, y=y + 9, data_share=share, kind="kind")

    def _span(self, since: float, until: float) -> str:
        return f"{self._when(since)} – {self._when(until)} ({until - since:.3f} s)"

    def _life(self, life: Life) -> str:
        since, until = life.started.at, min(life.end, self._told.last)
        code = f"\nexit code {life.exited.code}" if life.exited is not None else ""
        return _tag(
            "rect",
            x=self._x(since),
            y=self._bar_y(life.who) + BAR // 2 - 1,
            width=f"{self._share(until - since)}%",
            height=3,
            kind="life",
            data_tip=f"{life.who}\n{_described(life)}\n{self._span(since, until)}{code}",
        )

    def _held(self, life: Life) -> Iterator[str]:
        y = self._bar_y(life.who)
        for version, since, until in held(life, self._told.last):
            share = self._share(until - since)
            yield _tag(
                "rect",
                x=self._x(since),
                y=y,
                width=f"{share}%",
                height=BAR,
                kind=f"held c{version % COLOURS}",
                data_tip=f"{life.who} holds {version}\n{self._span(since, until)}",
            )
            middle = self._x((since + until) / 2)
            look = "number middle"
            yield _tag("text", str(version), x=middle, y=y + 12, data_share=share, kind=look)

    def _failures(self, life: Life) -> Iterator[str]:
        for call in life.calls:
            ended = call.ended
            if ended is None or not ended.error:
                continue
            said = f"{life.who}: {call.verb} {call.called.what}\n{ended.error}: {ended.message}"
            yield _tag(
                "rect",
                x=self._x(ended.at),
                y=self._bar_y(life.who),
                width=2,
                height=BAR,
                kind="failed",
                data_tip=f"{said}\n{self._span(call.began, ended.at)}",
            )

    def _breaches(self) -> Iterator[str]:
        for number, violation in enumerate(self._violations):
            said = f"{violation.guarantee}, {violation.check}\n{violation.who}: {violation.what}"
            yield _tag(
                "circle",
                id=f"violation-{number}",
                cx=self._x(violation.at),
                cy=self._y(violation.who) + 8,
                r=6,
                kind="violation",
                data_tip=f"{said}\n{self._when(violation.at)}",
            )


def _described(life: Life) -> str:
    started = life.started
    shard = f"shard {started.shard} of {started.num_shards}"
    return f"{started.role} in {started.replica}, {shard}, zone {started.zone} {started.host}"
