# SPDX-License-Identifier: Apache-2.0
"""An incident's timeline, as a person at 3 am wants to read it. Pure."""

from __future__ import annotations

from coordinator.model import Cause, Incident

_NS = 1_000_000_000

_CAUSES = {
    Cause.CAUSE_UNSPECIFIED: "failure",
    Cause.NODE_LOST: "node lost",
    Cause.TRAINER_ENDED: "trainer ended",
    Cause.GROUP_BROKEN: "group broken",
    Cause.NO_PROGRESS: "no progress",
    Cause.DEADLINE: "deadline missed",
    Cause.PLANNED: "planned change",
}


def size(count: int) -> str:
    """A number of bytes in the unit that suits it: 1.50 GB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def spans(incident: Incident) -> tuple[tuple[str, float, str], ...]:
    """(phase, seconds since the first mark, note) of each mark; 0 for a mark without a time."""
    if not incident.marks:
        return ()
    start = incident.marks[0].time_ns
    return tuple(
        (one.phase, max(0, one.time_ns - start) / _NS if one.time_ns else 0.0, one.note)
        for one in incident.marks
    )


def headline(incident: Incident) -> str:
    """One line: which incident, what it began with, where, and how it stands."""
    where = f" on {', '.join(incident.nodes)}" if incident.nodes else ""
    state = "over" if incident.closed else "OPEN"
    generations = f"generation {incident.first_generation}"
    if incident.last_generation > incident.first_generation:
        generations = f"generations {incident.first_generation} to {incident.last_generation}"
    return f"incident {incident.id}: {_CAUSES[incident.cause]}{where}, {generations}, {state}"


def outcome(incident: Incident) -> str:
    """One line: the total time, what was moved, and what was lost."""
    marks = spans(incident)
    parts = [f"{marks[-1][1]:.3f} s" if incident.closed and marks else "still open"]
    parts.append(f"{size(incident.bytes_moved)} moved")
    if incident.resume_step >= 0:
        parts.append(f"resumed at step {incident.resume_step}")
        steps = "1 step" if incident.lost_steps == 1 else f"{incident.lost_steps} steps"
        parts.append(f"{steps} computed again")
    return ", ".join(parts)


def timeline(incident: Incident) -> str:
    """The incident in several lines: headline, one line a mark with its seconds, outcome.

    The first number is the time since the detection, the second since the mark before.
    """
    lines = [headline(incident)]
    before = 0.0
    for phase, at, note in spans(incident):
        text = f"  {phase.replace('_', ' '):<12} {at:>9.3f} s  +{max(0.0, at - before):.3f} s"
        lines.append(f"{text}  {note}" if note else text)
        before = at
    lines.append(f"  {outcome(incident)}")
    return "\n".join(lines)


def in_short(incident: Incident) -> str:
    """The incident in one line: the headline, the marks with their seconds, the outcome."""
    marks = ", ".join(f"{phase} {at:.3f} s" for phase, at, _ in spans(incident))
    return f"{headline(incident)}: {marks}; {outcome(incident)}"
