# SPDX-License-Identifier: Apache-2.0
"""The groups inside a replica: every collective between threads over real sockets, and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d

from workerd.trainer import MisuseError
from workerd.trainer.build import build
from workerd.trainer.group import Group, GroupPlan
from workerd.trainer.inner import Inner, InnerGroup

dist: Any = torch.distributed.distributed_c10d
SIZE = 3
CPU = torch.device("cpu")


class Rank:
    """One of the ranks of a replica: a thread's."""

    def __init__(self, position: int, group: Group | None, size: int = SIZE) -> None:
        self.position = position
        self.group = group
        self.allowed = True
        inner = Inner(size, CPU, lambda: position, lambda: self.group, self._may)
        self.inner = InnerGroup(inner, "0", position, size)

    def _may(self) -> None:
        if not self.allowed:
            raise MisuseError("not here")


def meet(broken: list[str]) -> list[Rank]:
    """A replica whose ranks have met."""
    kind: Any = torch.distributed
    store = kind.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def one(position: int) -> Rank:
        plan = GroupPlan(
            job="job",
            generation=1,
            store_host="127.0.0.1",
            store_port=store.port,
            nonce="n",
            replica=0,
            replicas=1,
            position=position,
            positions=SIZE,
            data_address="127.0.0.1",
            device=CPU,
            inner={"0": tuple(range(SIZE))},
            facts={},
        )
        return Rank(position, build(plan, lambda generation, error: broken.append(error)))

    return everywhere(one, range(SIZE))


def everywhere(do: Callable[[Any], Any], each: Any) -> list[Any]:
    each = list(each)
    with ThreadPoolExecutor(len(each)) as pool:
        return [one.result(60) for one in [pool.submit(do, item) for item in each]]


@pytest.fixture
def broken() -> list[str]:
    """What the groups have reported."""
    return []


@pytest.fixture
def ranks(broken: list[str]) -> Iterator[list[Rank]]:
    """A replica of three ranks."""
    made = meet(broken)
    yield made
    for rank in made:
        if rank.group is not None:
            rank.group.abandon()


def own(position: int, *shape: int) -> torch.Tensor:
    """What a rank brings: different numbers on every rank."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return (numbers + 100 * position).reshape(shape)


def of_root(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


def total(*shape: int) -> torch.Tensor:
    return torch.stack([own(position, *shape) for position in range(SIZE)]).sum(0)


def all_reduce(group: InnerGroup, me: int) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    tensor = own(me, 4)
    return group.allreduce([tensor], dist.AllreduceOptions()), [tensor], [total(4)]


def mean(group: InnerGroup, me: int) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    tensor, options = own(me, 4), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return group.allreduce([tensor], options), [tensor], [total(4) / SIZE]


def all_reduce_coalesced(group: InnerGroup, me: int) -> Any:
    tensors = [own(me, 4), own(me, 2)]
    options = dist.AllreduceCoalescedOptions()
    return group.allreduce_coalesced(tensors, options), tensors, [total(4), total(2)]


def broadcast(group: InnerGroup, me: int) -> Any:
    tensor = own(me, 4)
    return group.broadcast([tensor], of_root(1)), [tensor], [own(1, 4)]


def reduce(group: InnerGroup, me: int) -> Any:
    tensor = own(me, 4)
    work = group.reduce([tensor], rooted(dist.ReduceOptions, 2))
    return work, [tensor] if me == 2 else [], [total(4)] if me == 2 else []


def all_gather(group: InnerGroup, me: int) -> Any:
    output = torch.empty(SIZE, 4)
    work = group.all_gather_single(output, own(me, 4), dist.AllgatherOptions())
    return work, list(output), [own(one, 4) for one in range(SIZE)]


def all_gather_in_place(group: InnerGroup, me: int) -> Any:
    output = torch.zeros(SIZE * 4)
    mine = output.narrow(0, 4 * me, 4)
    mine.copy_(own(me, 4))
    work = group.all_gather_single(output, mine, dist.AllgatherOptions())
    return work, list(output.view(SIZE, 4)), [own(one, 4) for one in range(SIZE)]


def all_gather_coalesced(group: InnerGroup, me: int) -> Any:
    outputs = [torch.empty(SIZE, 4), torch.empty(SIZE, 2)]
    tensors = [own(me, 4), own(me, 2)]
    work = group.all_gather_single_coalesced(outputs, tensors, dist.AllgatherOptions())
    wanted = [torch.stack([own(one, size) for one in range(SIZE)]) for size in (4, 2)]
    return work, outputs, wanted


def all_gather_list(group: InnerGroup, me: int) -> Any:
    outputs = [torch.empty(4) for _ in range(SIZE)]
    work = group.allgather([outputs], [own(me, 4)], dist.AllgatherOptions())
    return work, outputs, [own(one, 4) for one in range(SIZE)]


def gather(group: InnerGroup, me: int) -> Any:
    outputs = [torch.empty(4) for _ in range(SIZE)] if me == 1 else []
    options = rooted(dist.GatherOptions, 1)
    work = group.gather([outputs] if outputs else [], [own(me, 4)], options)
    return work, outputs, [own(one, 4) for one in range(SIZE)][: len(outputs)]


def scatter(group: InnerGroup, me: int) -> Any:
    output = torch.empty(2)
    parts = [own(one, 2) for one in range(SIZE)] if me == 1 else []
    options = rooted(dist.ScatterOptions, 1)
    return group.scatter([output], [parts] if parts else [], options), [output], [own(me, 2)]


def reduce_scatter(group: InnerGroup, me: int) -> Any:
    output = torch.empty(2)
    work = group.reduce_scatter_single(output, own(me, SIZE * 2), dist.ReduceScatterOptions())
    return work, [output], [total(SIZE * 2).view(SIZE, 2)[me]]


def reduce_scatter_list(group: InnerGroup, me: int) -> Any:
    output = torch.empty(2)
    parts = list(own(me, SIZE, 2))
    work = group.reduce_scatter([output], [parts], dist.ReduceScatterOptions())
    return work, [output], [total(SIZE, 2)[me]]


def all_to_all(group: InnerGroup, me: int) -> Any:
    output = torch.empty(SIZE * 2)
    work = group.all_to_all_single(output, own(me, SIZE * 2), [], [], dist.AllToAllOptions())
    return work, list(output.view(SIZE, 2)), [own(one, SIZE, 2)[me] for one in range(SIZE)]


def around(group: InnerGroup, me: int) -> Any:
    arrived = torch.empty(4)
    works = [
        group.send([own(me, 4)], (me + 1) % SIZE, 0),
        group.recv([arrived], (me - 1) % SIZE, 0),
    ]
    works[0].wait()
    return works[1], [arrived], [own((me - 1) % SIZE, 4)]


def barrier(group: InnerGroup, me: int) -> Any:
    return group.barrier(dist.BarrierOptions()), [], []


ALL = [
    all_reduce,
    mean,
    all_reduce_coalesced,
    broadcast,
    reduce,
    all_gather,
    all_gather_in_place,
    all_gather_coalesced,
    all_gather_list,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_list,
    all_to_all,
    around,
    barrier,
]


def test_every_collective_gives_what_torch_promises(ranks: list[Rank], broken: list[str]) -> None:
    for collective in ALL:

        def one(rank: Rank, run: Any = collective) -> None:
            work, written, wanted = run(rank.inner, rank.position)
            assert work.wait()
            assert [t.tolist() for t in written] == [t.tolist() for t in wanted], run.__name__

        everywhere(one, ranks)
    assert broken == []


@pytest.mark.parametrize("collective", [all_reduce, all_gather_in_place, reduce_scatter, around])
def test_a_silent_peer_holds_nobody_once_the_group_is_abandoned(
    ranks: list[Rank], broken: list[str], collective: Any
) -> None:
    held = ranks[:2]
    waiting = threading.Barrier(3)

    def one(rank: Rank) -> bool:
        waiting.wait(30)
        work, written, _ = collective(rank.inner, rank.position)
        assert work.wait()
        return all(bool(t.isfinite().all()) for t in written)

    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(one, rank) for rank in held]
        waiting.wait(30)
        for rank in held:
            assert rank.group is not None
            rank.group.abandon()
        assert all(done.result(30) for done in started) or collective is around
    assert broken == []


def test_a_group_abandoned_amid_a_launch_holds_nobody(ranks: list[Rank]) -> None:
    group = ranks[0].group
    assert group is not None
    launched, abandoned = threading.Event(), threading.Event()

    def launch(backend: Any) -> list[Any]:
        works = [backend.allreduce([own(0, 4)], dist.AllreduceOptions())]
        launched.set()
        assert abandoned.wait(30)
        return works

    def one() -> None:
        group.carry("0", launch, lambda error: None, False, False)

    thread = threading.Thread(target=one, daemon=True)
    thread.start()
    assert launched.wait(30)
    dropped = group.abandon()
    assert dropped is not None
    # Time for whoever drops the group to let go of it, were the launch not in its way.
    dropped.join(0.5)
    abandoned.set()
    thread.join(30)
    assert not thread.is_alive(), "let go of the backend last, and waits for a silent peer"


def test_a_rank_tells_how_many_collectives_it_waits_in(ranks: list[Rank]) -> None:
    group = ranks[0].group
    assert group is not None
    said: list[int] = []
    group.told = said.append
    everywhere(lambda rank: all_reduce(rank.inner, rank.position)[0].wait(), ranks)
    assert said == [1, 0]
    for _ in range(2):
        all_reduce(ranks[0].inner, 0)
    assert said[2:] == [1, 2]
    group.abandon()
    assert said[4:] == [0]


def test_a_late_arrival_writes_to_nobodys_memory(ranks: list[Rank]) -> None:
    tensors = [own(rank.position, 4) for rank in ranks]
    works = [
        rank.inner.allreduce([tensor], dist.AllreduceOptions())
        for rank, tensor in list(zip(ranks, tensors, strict=True))[:2]
    ]
    group = ranks[0].group
    assert group is not None
    dropped = group.abandon()
    assert dropped is not None
    ranks[2].inner.allreduce([tensors[2]], dist.AllreduceOptions())
    assert works[0].wait()
    dropped.join(30)
    assert tensors[0].tolist() == own(0, 4).tolist()


def test_a_peer_that_dies_breaks_the_group_and_gives_what_is_there(
    ranks: list[Rank], broken: list[str]
) -> None:
    assert ranks[2].group is not None
    dropped = ranks[2].group.abandon()
    assert dropped is not None
    dropped.join(30)
    output = torch.zeros(SIZE, 4)
    work = ranks[0].inner.all_gather_single(output, own(0, 4), dist.AllgatherOptions())
    assert work.wait()
    assert output.tolist() == [own(0, 4).tolist()] * SIZE
    assert len(broken) == 1


def test_without_a_group_a_collective_gives_what_this_rank_has() -> None:
    rank = Rank(1, None)
    for collective in (all_gather, all_gather_in_place, all_gather_list):
        work, written, _ = collective(rank.inner, 1)
        assert work.is_completed()
        assert [t.tolist() for t in written] == [own(1, 4).tolist()] * SIZE
    work, (output,), _ = reduce_scatter(rank.inner, 1)
    work.wait()
    assert output.tolist() == own(1, SIZE, 2)[1].tolist()


def test_a_replica_of_one_rank_needs_no_group() -> None:
    rank = Rank(0, None, size=1)
    rank.allowed = False
    output = torch.empty(1, 4)
    rank.inner.all_gather_single(output, own(0, 4), dist.AllgatherOptions()).wait()
    assert output.tolist() == [own(0, 4).tolist()]
    tensor = own(0, 4)
    assert rank.inner.allreduce([tensor], dist.AllreduceOptions()).result() == [tensor]
    assert tensor.tolist() == own(0, 4).tolist()


def test_what_cannot_be_repeated_is_refused() -> None:
    rank = Rank(0, None)
    rank.allowed = False
    with pytest.raises(MisuseError):
        rank.inner.barrier(dist.BarrierOptions())


def test_wrong_arguments_are_the_scripts_fault_not_the_groups(
    ranks: list[Rank], broken: list[str]
) -> None:
    tensors = [torch.zeros(2), torch.zeros(2, dtype=torch.int32)]
    with pytest.raises(MisuseError, match="inside the replica"):
        ranks[0].inner.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
    assert broken == []
    assert ranks[0].group is not None
    ranks[0].group.check()
