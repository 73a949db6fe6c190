# SPDX-License-Identifier: Apache-2.0
"""Answers as text for people and as JSON for programs. Pure, but for the local time zone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from coordinator.admin.timeline import timeline
from coordinator.model import Incident, JobState, from_record
from protos import admin_pb2, job_pb2, membership_pb2, node_pb2

_NS = 1_000_000_000


def as_json(message: Message, *, indent: int | None = 2) -> str:
    """A record as JSON, with every field; whole numbers of 64 bits are strings, as protobuf has it.

    ``indent`` None puts it into one line.
    """
    fields = MessageToDict(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    return json.dumps(fields, indent=indent, ensure_ascii=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under a header, as wide as they need to be."""
    lines = [tuple(header), *(tuple(_one_line(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _one_line(text: str) -> str:
    return text.strip().split("\n", 1)[0] or "-"


def _local(time_ns: int) -> str:
    """Wall-clock nanoseconds as local time; empty for 0."""
    if not time_ns:
        return ""
    moment = datetime.fromtimestamp(time_ns / _NS, tz=timezone.utc).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")


def _state(status: job_pb2.JobStatus) -> str:
    if not status.state:
        return "SUBMITTED"
    return job_pb2.JobStatus.State.Name(status.state)


def jobs(answer: admin_pb2.ListJobsResponse) -> str:
    """All jobs, a line each."""
    if not answer.jobs:
        return "no jobs"
    rows = [
        (
            one.job,
            _state(one.status),
            str(one.status.step),
            str(one.status.generation),
            str(one.status.replicas),
            one.status.reason,
        )
        for one in answer.jobs
    ]
    return table(("JOB", "STATE", "STEP", "GENERATION", "REPLICAS", "REASON"), rows)


def job(answer: admin_pb2.JobDescription) -> str:
    """One job: how it stands and why, who has which slot, and its last incident."""
    spec, status, generation = answer.job.spec, answer.status, answer.generation
    facts = [
        ("job", f"{spec.name}: {_state(status)}"),
        ("reason", status.reason.strip() or "not yet seen by a leader"),
    ]
    if answer.job.stop:
        facts.append(("stop", answer.job.stop))
    if answer.job.recovery_paused:
        facts.append(("recovery", f"paused: {answer.job.recovery_paused}"))
    if status.held:
        facts.append(("no verdict", status.held))
    rate = _rate(answer)
    facts.append(("step", f"{status.step}" + (f", {rate:.2f} steps/s" if rate else "")))
    phase = membership_pb2.Phase.Name(generation.phase) if generation.generation else "none yet"
    facts.append(("generation", f"{generation.generation} {phase}"))
    facts.append(
        (
            "replicas",
            f"{status.replicas} of {answer.job.wanted_replicas or spec.replicas} run, "
            f"at least {spec.min_replicas or spec.replicas} needed, "
            f"{spec.ranks_per_node} ranks a node, "
            f"{spec.spares} spares wanted",
        )
    )
    facts.append(("restarts", f"{generation.restarts} of {spec.restarts} used"))
    facts.append(("command", " ".join(spec.command)))
    if answer.job.submitted_ns:
        facts.append(("submitted", _local(answer.job.submitted_ns)))
    for position, digest in enumerate(status.digests):
        facts.append((f"state {position}", digest))
    blocks = [_facts(facts)]
    if answer.slots:
        blocks.append(_slots(answer))
    if answer.incidents:
        incident = from_record(Incident, answer.incidents[-1])
        count = len(answer.incidents)
        text = timeline(incident)
        blocks.append(text if count == 1 else f"{count} incidents, the last one:\n{text}")
    return "\n\n".join(blocks)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name.ljust(width)}  {_indented(text, width)}" for name, text in facts)


def _indented(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * (width + 2))


def _rate(answer: admin_pb2.JobDescription) -> float:
    if answer.status.state != job_pb2.JobStatus.RUNNING:
        return 0.0
    return min((one.steps_per_second for one in answer.progress.values()), default=0.0)


def _slots(answer: admin_pb2.JobDescription) -> str:
    per_node = answer.job.spec.ranks_per_node
    rows = []
    for slot in answer.slots:
        first = slot.slot * per_node
        ranks = f"{first}" if per_node == 1 else f"{first}-{first + per_node - 1}"
        seen = answer.progress.get(slot.node)
        steps = sorted({one.step for one in seen.ranks}) if seen is not None else []
        since = sorted({one.since for one in slot.ranks})
        rows.append(
            (
                str(slot.slot),
                slot.node or "(empty)",
                ranks,
                ",".join(map(str, since)),
                ",".join(map(str, steps)),
                slot.incarnation,
            )
        )
    return table(("SLOT", "NODE", "RANKS", "SINCE GENERATION", "STEP", "INCARNATION"), rows)


def nodes(answer: admin_pb2.ListNodesResponse) -> str:
    """All nodes, a line each."""
    if not answer.nodes:
        return "no nodes"
    rows = []
    for one in answer.nodes:
        state, why = _node_state(one)
        rows.append((one.node.node, state, _place(one), _devices(one.node), one.node.version, why))
    return table(("NODE", "STATE", "PLACE", "DEVICES", "VERSION", "WHY"), rows)


def _node_state(one: admin_pb2.NodeDescription) -> tuple[str, str]:
    """In one word, and why; the worst first."""
    dead = {entry.incarnation: entry.reason for entry in one.flags.dead}
    if one.alive and one.node.incarnation in dead:
        return "dead", dead[one.node.incarnation]
    if not one.alive:
        last = one.flags.dead[-1].reason if one.flags.dead else "its lease has ended"
        return "gone", last
    for mark in ("quarantined", "draining", "replacing", "cordoned"):
        why = str(getattr(one.flags, mark))
        if why:
            return ("drained" if mark == "draining" and _empty(one) else mark), why
    if one.node.unhealthy:
        return "unhealthy", one.node.unhealthy
    return "ready", ""


def _empty(one: admin_pb2.NodeDescription) -> bool:
    """Whether a node has no place and runs no trainer."""
    ended = node_pb2.Trainer.State.ENDED
    return not one.assignment.job and all(each.state == ended for each in one.node.trainers)


def _place(one: admin_pb2.NodeDescription) -> str:
    if one.assignment.job:
        return f"{one.assignment.job} slot {one.assignment.slot}"
    if one.spare.job:
        hot = one.node.warm.job == one.spare.job
        return f"{one.spare.job} {'hot spare' if hot else 'spare, warming'}"
    return "free"


def _devices(node: node_pb2.Node) -> str:
    kinds = [node_pb2.Device.Kind.Name(one.kind).lower() for one in node.devices]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def explanation(answer: admin_pb2.ExplainJobResponse) -> str:
    """What is done for a job now, or why it isn't, and what stands against its nodes."""
    status, generation = answer.status, answer.generation
    facts = [
        ("job", f"{answer.job}: {_state(status)}"),
        ("reason", status.reason.strip() or "not yet seen by a leader"),
    ]
    if generation.generation:
        phase = membership_pb2.Phase.Name(generation.phase)
        facts.append(("generation", f"{generation.generation} {phase}: {generation.reason}"))
    if answer.recovery_paused:
        facts.append(("recovery", f"paused: {answer.recovery_paused}"))
    over = bool(status.state) and JobState(status.state).ended
    done = _actions(answer.actions) or ("nothing: it has ended" if over else "nothing is due")
    facts.append(("now", done))
    blocks = [_facts(facts)]
    if answer.nodes:
        rows = [(one.node, one.place, one.note) for one in answer.nodes]
        blocks.append(table(("NODE", "PLACE", "WHAT STANDS AGAINST IT"), rows))
    return "\n\n".join(blocks)


def dry_run(answer: admin_pb2.ChangeResponse) -> str:
    """What would be done after a change."""
    if not answer.changed:
        return "it stands so already: nothing would change"
    return _actions(answer.plan) or "nothing would be done now"


def _actions(actions: Iterable[admin_pb2.PlannedAction]) -> str:
    lines = []
    for one in actions:
        about = f"job {one.job}" if one.job else f"node {one.node}"
        if one.kind in ("wait", "blocked"):
            word = "waits" if one.kind == "wait" else "waits, and can't go on by itself"
            lines.append(f"{about} {word}: {one.reason}")
        else:
            lines.append(f"{about}: {one.what}: {one.reason}")
    return "\n".join(lines)


def event(one: admin_pb2.Event) -> str:
    """One event in one line: revision, time, what, about what, and the message."""
    when = _local(one.time_ns) or "(before this call)"
    about = " ".join(part for part in (one.job, one.node) if part)
    text = f"{one.revision:>8}  {when:<29}  {one.kind:<18}  {about}"
    message = one.message.strip().replace("\n", "\n" + " " * 12)
    return f"{text}: {message}" if message else text
