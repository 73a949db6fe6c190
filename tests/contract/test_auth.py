# SPDX-License-Identifier: Apache-2.0
"""Users, passwords and tokens that end; and TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.store import (
    Absent,
    Changed,
    Disconnected,
    Lease,
    LeaseEvent,
    LeaseRenewed,
    Listed,
    Put,
    Store,
    StoreAuthError,
    StoreRequestError,
    StoreUnavailable,
    Tls,
)
from tests.contract.recorder import Recorder, watching
from tests.etcd import Etcd, ctl


@pytest.fixture
def guarded() -> Iterator[Etcd]:
    """An etcd with users, whose tokens end after two seconds."""
    with Etcd(flags=["--auth-token-ttl=2"]) as etcd:
        ctl(etcd, "user", "add", "root:rootpw")
        ctl(etcd, "user", "add", "hot:hotpw")
        ctl(etcd, "role", "add", "spare")
        ctl(etcd, "role", "grant-permission", "--prefix=true", "spare", "readwrite", "/mine/")
        ctl(etcd, "user", "grant-role", "root", "root")
        ctl(etcd, "user", "grant-role", "hot", "spare")
        ctl(etcd, "auth", "enable")
        yield etcd


def test_tokens_are_renewed(guarded: Etcd) -> None:
    with Store(
        guarded.endpoints, prefix="/mine", user="hot", password="hotpw", keepalive=1.0
    ) as store:
        events: Recorder[LeaseEvent] = Recorder(store)
        lease = Lease(store, 5, events.put)
        with watching(store, "k/", "j/") as seen:
            seen.until(Listed)
            for number in range(2):
                store.commit([Absent(f"k/{number}")], [Put(f"k/{number}", b"", lease.id)])
                assert [c.key for c in seen.until(Changed).changes] == [f"k/{number}"]
                # etcd keeps its tokens in memory, so they end with it, at once.
                if number == 0:
                    guarded.kill()
                    seen.until(Disconnected)
                    guarded.start()
                    guarded_ready(store)
            events.until(LeaseRenewed)
        lease.close(revoke=True)


def test_a_token_that_etcd_forgot_is_renewed_within_a_call(guarded: Etcd) -> None:
    with Store(guarded.endpoints, prefix="/mine", user="hot", password="hotpw") as store:
        store.commit([], [Put("a", b"1")])
        guarded.restart()
        store.commit([], [Put("a", b"2")])
        guarded.restart()
        found = store.get("a")
        assert found is not None
        assert found.value == b"2"


def guarded_ready(store: Store) -> None:
    for _ in range(10):
        try:
            store.get("x")
            return
        except StoreUnavailable:
            continue
    raise AssertionError("etcd did not come back")


def test_what_etcd_refuses(guarded: Etcd) -> None:
    with (
        Store(guarded.endpoints, prefix="/mine") as store,
        pytest.raises(StoreAuthError, match="user name is empty"),
    ):
        store.get("a")
    with (
        Store(guarded.endpoints, prefix="/mine", user="hot", password="wrong") as store,
        pytest.raises(StoreAuthError, match="authentication failed"),
    ):
        store.get("a")
    with Store(guarded.endpoints, prefix="/other", user="hot", password="hotpw") as store:
        with pytest.raises(StoreAuthError, match="'a': PERMISSION_DENIED"):
            store.commit([], [Put("a", b"")])
        with watching(store, "k/") as events:
            assert "ermission" in events.until(Disconnected).reason


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority and one certificate for 127.0.0.1 and etcd.test, for both sides."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "1",
            "-subj", "/CN=authority")  # fmt: skip
    openssl("req", *key, "-keyout", "etcd.key", "-out", "etcd.csr", "-subj", "/CN=etcd")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:etcd.test\n")
    openssl("x509", "-req", "-in", "etcd.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", "etcd.pem", "-days", "1", "-extfile", "names")  # fmt: skip
    return folder


def test_tls_with_several_addresses(certificates: Path) -> None:
    ca, cert, key = (certificates / name for name in ("ca.pem", "etcd.pem", "etcd.key"))
    with Etcd(tls=(ca, cert, key)) as etcd:
        both = [etcd.endpoints[0], etcd.endpoints[0].replace("127.0.0.1", "127.0.0.2")]
        for name in (None, "etcd.test"):
            tls = Tls(ca, cert, key, server_name=name)
            with Store(both, prefix="/x", credentials=tls) as store:
                store.commit([], [Put("a", b"")])
                with watching(store, "a") as events:
                    assert set(events.until(Listed).items) == {"a"}
        with (
            Store(both, prefix="/x", credentials=Tls(ca), timeout=1.0) as store,
            pytest.raises(StoreUnavailable),
        ):
            store.get("a")
        wrong = Tls(ca, cert, key, server_name="elsewhere.test")
        with (
            Store(both, prefix="/x", credentials=wrong, timeout=1.0) as store,
            pytest.raises(StoreUnavailable),
        ):
            store.get("a")
    with pytest.raises(StoreRequestError, match="TLS credentials"):
        Store(["127.0.0.1:1"], prefix="/x", credentials=Tls(ca, cert))
