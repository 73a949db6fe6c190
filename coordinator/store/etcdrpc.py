# SPDX-License-Identifier: Apache-2.0
"""Makes etcd3 usable on current protobuf.

etcd3 0.12 ships stubs that protobuf 4 and later refuse to load. Its code only needs a module
``etcd3.etcdrpc`` with etcd's messages and stubs, so this one registers ours (``protos/etcd``)
under that name before etcd3 is imported for the first time. Whoever needs etcd3 takes it from
here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from protos.etcd import rpc_pb2, rpc_pb2_grpc

_NAME = "etcd3.etcdrpc"


def _load() -> Any:
    present = sys.modules.get(_NAME)
    if present is None:
        module = ModuleType(_NAME, __doc__)
        for source in (rpc_pb2, rpc_pb2_grpc):
            names = {n: v for n, v in vars(source).items() if not n.startswith("_")}
            vars(module).update(names)
        sys.modules[_NAME] = module
    elif getattr(present, "RangeRequest", None) is not rpc_pb2.RangeRequest:
        raise ImportError(
            "etcd3 was imported before coordinator.store.etcdrpc: "
            "its own protobuf stubs are loaded, which cannot be replaced any more"
        )
    import etcd3  # not before its stubs are registered

    return etcd3


etcd3: Any = _load()
