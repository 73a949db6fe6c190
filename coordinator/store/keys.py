# SPDX-License-Identifier: Apache-2.0
"""The key layout. Every key of the cluster is made and read here, relative to its prefix."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from coordinator.store.errors import InvalidKey

# Ranges to list and to watch.
ELECTION = "election/"
NODES = "nodes/"
FLAGS = "flags/"
ASSIGNMENTS = "assignments/"
SPARES = "spares/"
JOBS = "jobs/"
INCIDENTS = "incidents/"

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9_.]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


def check_name(name: str, what: str = "name") -> str:
    """Return ``name`` if it may be part of a key.

    At most 63 lower-case letters, digits and ``-_.``, with a letter or digit at both ends.
    Raises :class:`InvalidKey`.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidKey(
            f"{what} {name!r}: must be 1 to 63 of a-z, 0-9, '-', '_' and '.', "
            "with a letter or digit at both ends"
        )
    return name


def _number(number: int, what: str) -> str:
    if isinstance(number, bool) or not 0 <= number < 2**63:
        raise InvalidKey(f"{what} {number!r}: must be a whole number from 0 on")
    return str(number)


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that start with ``prefix``, as etcd wants it.

    ``b"\\0"`` stands for the end of the key space, where no key lies above the prefix.
    """
    stripped = prefix.rstrip(b"\xff")
    if not stripped:
        return b"\0"
    return stripped[:-1] + bytes([stripped[-1] + 1])


def election(candidate: str) -> str:
    """Who leads: the candidate with the lowest create revision."""
    return ELECTION + check_name(candidate, "candidate")


def node(node: str) -> str:
    """What workerd says of its node; on the node's lease."""
    return NODES + check_name(node, "node")


def flags(node: str) -> str:
    """What the leader holds against a node: dead incarnations, cordoned, draining, …"""
    return FLAGS + check_name(node, "node")


def assignment(node: str) -> str:
    """The node's place: a job and a slot."""
    return ASSIGNMENTS + check_name(node, "node")


def spare(node: str) -> str:
    """Which job the leader wants this spare to be warm for."""
    return SPARES + check_name(node, "node")


def job_prefix(job: str) -> str:
    """The prefix of everything of one job."""
    return f"{JOBS}{check_name(job, 'job')}/"


def job_spec(job: str) -> str:
    """What the operator submitted, validated."""
    return job_prefix(job) + "spec"


def job_status(job: str) -> str:
    """The job's state and why."""
    return job_prefix(job) + "status"


def generation(job: str) -> str:
    """The job's generation record."""
    return job_prefix(job) + "generation"


def slots_prefix(job: str) -> str:
    """The prefix of a job's slots."""
    return job_prefix(job) + "slots/"


def slot(job: str, slot: int) -> str:
    """One slot of a job: the node in it, its incarnation and trainer instances."""
    return slots_prefix(job) + _number(slot, "slot")


def acks_prefix(job: str) -> str:
    """The prefix of a job's acknowledgements."""
    return job_prefix(job) + "acks/"


def ack(job: str, node: str) -> str:
    """A node's acknowledgement of one generation; on the node's lease."""
    return acks_prefix(job) + check_name(node, "node")


def progress_prefix(job: str) -> str:
    """The prefix of a job's progress keys."""
    return job_prefix(job) + "progress/"


def progress(job: str, node: str) -> str:
    """A node's step and rate; on the node's lease."""
    return progress_prefix(job) + check_name(node, "node")


def checkpoints_prefix(job: str) -> str:
    """The prefix of a job's checkpoints."""
    return job_prefix(job) + "checkpoints/"


def checkpoint(job: str, step: int) -> str:
    """A complete checkpoint."""
    return checkpoints_prefix(job) + _number(step, "step")


def incident(incident: str) -> str:
    """One failure, from detection to the first step after it."""
    return INCIDENTS + check_name(incident, "incident")


class KeyKind(enum.Enum):
    """What a key holds."""

    ELECTION = "election"
    NODE = "node"
    FLAGS = "flags"
    ASSIGNMENT = "assignment"
    SPARE = "spare"
    JOB_SPEC = "spec"
    JOB_STATUS = "status"
    GENERATION = "generation"
    SLOT = "slot"
    ACK = "ack"
    PROGRESS = "progress"
    CHECKPOINT = "checkpoint"
    INCIDENT = "incident"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """What a key is about. Fields that its kind does not have are empty or -1.

    ``name`` is the candidate or the incident, ``number`` the slot or the checkpoint's step.
    """

    kind: KeyKind
    job: str = ""
    node: str = ""
    name: str = ""
    number: int = -1


_UNKNOWN = ParsedKey(KeyKind.UNKNOWN)
_OF_NODE = {
    "nodes": KeyKind.NODE,
    "flags": KeyKind.FLAGS,
    "assignments": KeyKind.ASSIGNMENT,
    "spares": KeyKind.SPARE,
}
_NAMED = {"election": KeyKind.ELECTION, "incidents": KeyKind.INCIDENT}
_OF_JOB = {
    "spec": KeyKind.JOB_SPEC,
    "status": KeyKind.JOB_STATUS,
    "generation": KeyKind.GENERATION,
}
_OF_JOB_AND_NODE = {"acks": KeyKind.ACK, "progress": KeyKind.PROGRESS}
_OF_JOB_NUMBERED = {"slots": KeyKind.SLOT, "checkpoints": KeyKind.CHECKPOINT}


def parse(key: str) -> ParsedKey:
    """Return what ``key`` is about: the inverse of the functions above.

    A key that none of them makes is :attr:`KeyKind.UNKNOWN`, not an error: during a rolling
    upgrade a newer version may already write keys that this one does not know.
    """
    match key.split("/"):
        case [top, name] if top in _OF_NODE and _NAME.fullmatch(name):
            return ParsedKey(_OF_NODE[top], node=name)
        case [top, name] if top in _NAMED and _NAME.fullmatch(name):
            return ParsedKey(_NAMED[top], name=name)
        case ["jobs", name, *rest] if _NAME.fullmatch(name):
            return _parse_job(name, rest)
    return _UNKNOWN


def _parse_job(job: str, rest: list[str]) -> ParsedKey:
    match rest:
        case [leaf] if leaf in _OF_JOB:
            return ParsedKey(_OF_JOB[leaf], job=job)
        case [leaf, node] if leaf in _OF_JOB_AND_NODE and _NAME.fullmatch(node):
            return ParsedKey(_OF_JOB_AND_NODE[leaf], job=job, node=node)
        case [leaf, text] if leaf in _OF_JOB_NUMBERED and _NUMBER.fullmatch(text):
            number = int(text)
            if number < 2**63:
                return ParsedKey(_OF_JOB_NUMBERED[leaf], job=job, number=number)
    return _UNKNOWN
