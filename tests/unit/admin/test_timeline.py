# SPDX-License-Identifier: Apache-2.0
"""An incident as a person reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.admin.timeline import headline, in_short, outcome, size, timeline
from coordinator.model import Cause, Incident, IncidentMark

MS = 1_000_000
START = 1_700_000_000_000 * MS

INCIDENT = Incident(
    id="demo.2",
    job="demo",
    cause=Cause.NODE_LOST,
    nodes=("n1",),
    detail="why",
    first_generation=2,
    last_generation=2,
    marks=(
        IncidentMark("detected", "slot 1: n1 -> hot spare n3", START),
        IncidentMark("paused", "", START + 40 * MS),
        IncidentMark("pulled", "22000000 bytes", START + 340 * MS),
        IncidentMark("regrouped", "", START + 400 * MS),
        IncidentMark("first_step", "", START + 1250 * MS),
    ),
    resume_step=17,
    lost_steps=1,
    bytes_moved=22_000_000,
    closed=True,
)


def test_the_whole() -> None:
    assert timeline(INCIDENT) == "\n".join(
        [
            "incident demo.2: node lost on n1, generation 2, over",
            "  detected         0.000 s  +0.000 s  slot 1: n1 -> hot spare n3",
            "  paused           0.040 s  +0.040 s",
            "  pulled           0.340 s  +0.300 s  22000000 bytes",
            "  regrouped        0.400 s  +0.060 s",
            "  first step       1.250 s  +0.850 s",
            "  1.250 s, 22.00 MB moved, resumed at step 17, 1 step computed again",
        ]
    )


def test_an_open_one() -> None:
    begun = replace(INCIDENT, closed=False, marks=INCIDENT.marks[:1], resume_step=-1)
    assert headline(begun).endswith("generation 2, OPEN")
    assert outcome(begun) == "still open, 22.00 MB moved"


def test_several_generations_nobody_s_fault_and_nothing_lost() -> None:
    other = replace(INCIDENT, cause=Cause.GROUP_BROKEN, nodes=(), last_generation=4, lost_steps=0)
    assert headline(other) == "incident demo.2: group broken, generations 2 to 4, over"
    assert "0 steps computed again" in outcome(other)


def test_one_line() -> None:
    text = in_short(INCIDENT)
    assert "\n" not in text
    assert "detected 0.000 s, paused 0.040 s" in text


def test_without_marks_or_times() -> None:
    assert "0.000 s" not in timeline(Incident(id="x.1", closed=True))
    unstamped = replace(INCIDENT, marks=(IncidentMark("detected"), IncidentMark("paused")))
    assert "  paused           0.000 s" in timeline(unstamped)


def test_a_clock_that_was_set_back_shows_no_negative_time() -> None:
    back = (IncidentMark("detected", "", START), IncidentMark("paused", "", START - 5 * MS))
    assert "-" not in timeline(replace(INCIDENT, marks=back)).split("\n")[2]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (22_000_000, "22.00 MB"),
        (1_500_000_000, "1.50 GB"),
        (2 * 10**18, "2000.00 PB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
