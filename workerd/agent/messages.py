# SPDX-License-Identifier: Apache-2.0
"""The link's messages for the actions that send something."""

from __future__ import annotations

from coordinator.model import to_record
from protos import membership_pb2, trainer_pb2
from workerd.agent.actions import (
    SendHold,
    SendRelease,
    SendRestore,
    SendRunning,
    SendStop,
    SendWelcome,
)


def welcome(action: SendWelcome, node: str, data_address: str) -> trainer_pb2.Welcome:
    """The first answer to a trainer."""
    spec = action.spec
    return trainer_pb2.Welcome(
        job=action.job,
        spec_revision=action.spec_revision,
        node=node,
        seed=spec.seed,
        local_rank=action.local_rank,
        ranks_per_node=spec.ranks_per_node,
        shard_positions=spec.shard_positions,
        replicas=spec.replicas,
        spare=action.spare,
        data_address=data_address,
    )


def stop(action: SendStop) -> trainer_pb2.Stop:
    """PAUSE."""
    return trainer_pb2.Stop(
        generation=action.generation,
        rank=action.rank,
        offer_rendezvous=action.offer_rendezvous,
    )


def restore(action: SendRestore) -> trainer_pb2.Restore:
    """RESTORE."""
    rendezvous = action.rendezvous
    return trainer_pb2.Restore(
        generation=action.generation,
        resume_step=action.resume_step,
        initial=action.initial,
        rank=action.rank,
        replica=action.replica,
        replicas=action.replicas,
        shard_position=action.shard_position,
        sources=[to_record(one, membership_pb2.Source()) for one in action.sources],
        rendezvous=(
            to_record(rendezvous, membership_pb2.Rendezvous()) if rendezvous is not None else None
        ),
        reserve=action.reserve,
    )


def running(action: SendRunning) -> trainer_pb2.Running:
    """RUNNING."""
    return trainer_pb2.Running(generation=action.generation)


def hold(action: SendHold) -> trainer_pb2.Hold:
    """The wish for a stop after the step under way."""
    return trainer_pb2.Hold(generation=action.generation)


def release(action: SendRelease) -> trainer_pb2.Release:
    """The job's end."""
    return trainer_pb2.Release(step=action.step)
