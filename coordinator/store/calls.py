# SPDX-License-Identifier: Apache-2.0
"""Calls to etcd: one channel for all endpoints, deadlines, repeated tries, tokens, typed errors."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import tenacity
from tenacity.nap import sleep_using_event

from coordinator.store import target
from coordinator.store.errors import (
    StoreAuthError,
    StoreError,
    StoreRequestError,
    StoreUnavailable,
    translate,
)
from coordinator.store.etcdrpc import etcd3
from protos.etcd import rpc_pb2, rpc_pb2_grpc

_Q = TypeVar("_Q")
_R = TypeVar("_R")
_Q_contra = TypeVar("_Q_contra", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)

_log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]

# A member without a leader refuses at once instead of letting the call run into its deadline.
_LOOK_UP_EVERY = 5.0  # seconds
_HAS_LEADER = ("hasleader", "true")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the authority that signed etcd's certificate, and this client's own pair.

    ``server_name`` is what etcd's certificate must name; by default the first endpoint's host.
    """

    ca: str | os.PathLike[str]
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None


class _Unary(Protocol[_Q_contra, _R_co]):
    def __call__(
        self, request: _Q_contra, timeout: float | None, *, metadata: Metadata
    ) -> _R_co: ...


class Calls:
    """The stubs, and the ways to call them. Thread-safe.

    ``timeout`` is in seconds, for an operation with all its tries. Making one needs no etcd.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout: float,
        tls: Tls | None,
        user: str | None,
        password: str | None,
        keepalive: float,
    ) -> None:
        if not endpoints:
            raise StoreRequestError("no etcd endpoint given")
        if (user is None) != (password is None):
            raise StoreRequestError("etcd user and password: give both or neither")
        parsed = [target.parse_endpoint(text) for text in endpoints]
        if tls is None and any(secure for _, secure in parsed):
            raise StoreRequestError("an https endpoint needs TLS credentials")
        self.timeout = timeout
        self.endpoints = ",".join(str(endpoint) for endpoint, _ in parsed)
        self._parsed = [endpoint for endpoint, _ in parsed]
        self._tls, self._keepalive = tls, keepalive
        self._login = (user, password)
        self._login_lock = threading.Lock()
        self._token: str | None = None
        self._closed = threading.Event()
        self._resolver: threading.Thread | None = None
        self._resolved = time.monotonic()
        self._lock = threading.Lock()
        self._dial(target.resolve(self._parsed))

    def _dial(self, dialled: target.Target) -> None:
        self._dialled = dialled
        self._client = _client(dialled, self._tls, self._keepalive, self.timeout)
        self.kv: rpc_pb2_grpc.KVStub = self._client.kvstub
        self.lease: rpc_pb2_grpc.LeaseStub = self._client.leasestub
        self.watch = rpc_pb2_grpc.WatchStub(self._client.channel)
        self._maintenance: rpc_pb2_grpc.MaintenanceStub = self._client.maintenancestub
        self._auth = rpc_pb2_grpc.AuthStub(self._client.channel)

    def close(self) -> None:
        """Give the connections back; calls in progress end with :class:`StoreUnavailable`."""
        with self._lock:
            self._closed.set()
            self._client.close()

    def look_up_again(self) -> None:
        """etcd could not be reached: see in the background whether its names have moved.

        gRPC does that itself for a single name, but not for a list of addresses.
        """
        with self._lock:
            if (
                self._closed.is_set()
                or self._dialled.names < 2
                or self._resolver is not None
                or time.monotonic() - self._resolved < _LOOK_UP_EVERY
            ):
                return
            # A thread: a name server that does not answer holds its caller for long.
            self._resolver = threading.Thread(
                target=self._look_up, name="store-resolver", daemon=True
            )
            self._resolver.start()

    def _look_up(self) -> None:
        before = None
        try:
            found = target.resolve(self._parsed)
            with self._lock:
                if not self._closed.is_set() and not found.same(self._dialled):
                    _log.warning("etcd %s: now at %s", self.endpoints, found.text)
                    before = self._client
                    self._dial(found)
        except StoreError as error:
            _log.info("etcd %s: %s", self.endpoints, error)
        finally:
            with self._lock:
                self._resolver = None
                self._resolved = time.monotonic()
        if before is not None:
            before.close()  # its calls and streams end, and begin again on the new one

    def metadata(self, timeout: float | None = None) -> Metadata:
        """Return what every call carries; logs in if there is no token. Raises StoreError."""
        user, password = self._login
        if user is None:
            return (_HAS_LEADER,)
        with self._login_lock:
            if self._token is None:
                request = rpc_pb2.AuthenticateRequest(name=user, password=password or "")
                call = _Call("authenticate", user, timeout or self.timeout)
                answer = self._once(call, self._auth.Authenticate, request, (_HAS_LEADER,))
                self._token = answer.token
            return (_HAS_LEADER, ("token", self._token))

    def status(self) -> rpc_pb2.StatusResponse:
        """Return what one member (any) says of itself and its cluster. Raises StoreError."""
        return self.retried("status", "", lambda: self._maintenance.Status, rpc_pb2.StatusRequest())

    def error(self, error: grpc.RpcError, operation: str, key: str = "") -> StoreError:
        """Return the typed error of a stream. A refused token is forgotten."""
        typed = translate(error, endpoints=self.endpoints, operation=operation, key=key)
        if isinstance(typed, StoreAuthError) and typed.renewable:
            self.forget_token()
        elif isinstance(typed, StoreUnavailable):
            self.look_up_again()
        return typed

    def forget_token(self) -> None:
        """Log in again before the next call."""
        self._token = None

    def retried(
        self,
        operation: str,
        key: str,
        method: Callable[[], _Unary[_Q, _R]],
        request: _Q,
        *,
        write: bool = False,
    ) -> _R:
        """Call until it succeeds, fails for good or the timeout is over. Raises StoreError.

        ``write``: it may not be carried out twice, so it is only sent again where the try before
        was certainly not carried out. ``method`` is asked for anew for each try, since the
        channel may be another one by then.
        """
        deadline = time.monotonic() + self.timeout
        renewed = False

        def attempt() -> _R:
            nonlocal renewed
            left = max(0.05, deadline - time.monotonic())
            # A read that a frozen member holds goes to another one; a write must wait.
            share = left if write else min(left, max(0.25, self.timeout / 3))
            call = _Call(operation, key, share, write)
            while True:
                metadata = self.metadata(share)
                try:
                    return self._once(call, method(), request, metadata)
                except StoreAuthError as error:
                    if renewed or not error.renewable or self._login[0] is None:
                        raise
                    renewed = True
                    self.forget_token()

        retrying = tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_delay(self.timeout),
                tenacity.stop_when_event_set(self._closed),
            ),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            retry=tenacity.retry_if_exception(_repeatable),
            sleep=sleep_using_event(self._closed),
            reraise=True,
        )
        return retrying(attempt)

    def _once(self, call: _Call, method: _Unary[_Q, _R], request: _Q, metadata: Metadata) -> _R:
        try:
            return method(request, call.timeout, metadata=metadata)
        except grpc.RpcError as error:
            typed = translate(
                error,
                endpoints=self.endpoints,
                operation=call.operation,
                key=call.key,
                write=call.write,
            )
            if isinstance(typed, StoreUnavailable):
                self.look_up_again()
            raise typed from error
        except ValueError as error:
            # What gRPC says of a closed channel: the store's, or the one before a new look-up.
            raise StoreUnavailable(
                f"etcd {self.endpoints}: {call.operation} {call.key!r}: {error}",
                retryable=not self._closed.is_set(),
            ) from error


@dataclass(frozen=True, slots=True)
class _Call:
    operation: str
    key: str
    timeout: float
    write: bool = False


def _repeatable(error: BaseException) -> bool:
    return isinstance(error, StoreUnavailable) and error.retryable and not error.outcome_unknown


def _client(dialled: target.Target, tls: Tls | None, keepalive: float, timeout: float) -> Any:
    name = None if tls is None else tls.server_name or dialled.server_name
    options = target.channel_options(
        keepalive=keepalive, connect_timeout=min(2.0, timeout), server_name=name
    )
    # etcd3 joins host and port with a colon again, whatever the host part says.
    host, _, port = dialled.text.rpartition(":")
    files = {}
    if tls is not None:
        files = {
            "ca_cert": tls.ca,
            "cert_cert": tls.cert,
            "cert_key": tls.key,
        }
    try:
        return etcd3.Etcd3Client(
            host=host, port=port, timeout=timeout, grpc_options=options, **files
        )
    except (OSError, ValueError) as error:
        raise StoreRequestError(f"TLS credentials for etcd: {error}") from error
