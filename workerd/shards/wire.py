# SPDX-License-Identifier: Apache-2.0
"""What both ends of a pull agree on."""

from __future__ import annotations

import dataclasses
from typing import Final

from protos import shards_pb2

_MOST_BYTES: Final = 256 << 20  # a manifest of a million tensors
OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.max_receive_message_length", _MOST_BYTES),
    ("grpc.max_send_message_length", _MOST_BYTES),
    # A peer that is gone or frozen is noticed in about a second; without the third in twenty.
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection that is not answered is given up as soon.
    ("grpc.initial_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 1000),
]


@dataclasses.dataclass(frozen=True)
class ShardIdentity:
    """For what exactly a state is served."""

    job: str
    generation: int
    step: int
    shard_position: int
    instance: str
    """Of the source's trainer."""
    nonce: str
    """Of the generation's rendezvous."""

    def request(self) -> shards_pb2.ShardRequest:
        """As it is asked for."""
        return shards_pb2.ShardRequest(**dataclasses.asdict(self))

    @classmethod
    def of(cls, request: shards_pb2.ShardRequest) -> ShardIdentity:
        """What a request names."""
        return cls(**{f.name: getattr(request, f.name) for f in dataclasses.fields(cls)})
