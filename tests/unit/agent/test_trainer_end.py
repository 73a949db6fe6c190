# SPDX-License-Identifier: Apache-2.0
"""What is told of a trainer's end."""

from __future__ import annotations

import dataclasses

from coordinator.model import FailureClass
from protos import trainer_pb2
from workerd.agent.state import TrainerFacts
from workerd.agent.trainers import Entry
from workerd.supervisor.evidence import Ending


def _entry() -> Entry:
    needed = {
        one.name: "" if one.type == "str" else 0
        for one in dataclasses.fields(TrainerFacts)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    return Entry(TrainerFacts(**needed))  # type: ignore[arg-type]


def test_the_traceback_is_told_although_workerd_had_to_end_it() -> None:
    entry = _entry()
    entry.hear(trainer_pb2.Failed(step=3, traceback="ValueError: no data"))
    entry.set(ending="it has closed its link and goes on")
    entry.end(Ending(signal=9), now=1.0)
    assert entry.facts.exit is not None
    assert entry.facts.exit.traceback == entry.facts.exit.cause == "ValueError: no data"
    assert entry.facts.exit.failure_class is FailureClass.SOFTWARE


def test_without_a_traceback_it_is_told_why_workerd_ended_it() -> None:
    entry = _entry()
    entry.set(ending="its place is taken")
    entry.end(Ending(signal=15, stderr="a warning"), now=1.0)
    assert entry.facts.exit is not None
    assert entry.facts.exit.cause == "ended by workerd: its place is taken"
    assert entry.facts.exit.failure_class is FailureClass.CLASS_UNSPECIFIED
