# SPDX-License-Identifier: Apache-2.0
"""What is named, refused, copied and put back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.shards.objects import Position, Tied, train
from workerd.shards.errors import UnsupportedState
from workerd.shards.state import TrackedState


def _names(state: TrackedState) -> list[str]:
    return [entry.name for entry in state.manifest(0).tensors]


def test_names_follow_the_objects_and_their_keys() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    assert _names(TrackedState({"model": model, "optimizer": optimizer})) == [
        # The shared weight is one tensor, under its first name.
        "model/embedding.weight",
        "model/norm.weight",
        "model/norm.bias",
        "model/norm.running_mean",
        "model/norm.running_var",
        "model/norm.num_batches_tracked",
        *(
            f"optimizer/state/{index}/{key}"
            for index in range(3)
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
    ]


def test_a_parameter_in_two_objects_is_one_tensor() -> None:
    body = nn.Linear(4, 4)
    state = TrackedState({"body": body, "whole": nn.Sequential(body, nn.Linear(4, 2))})
    assert _names(state) == ["body/weight", "body/bias", "whole/1.weight", "whole/1.bias"]


def test_serving_copies_nothing() -> None:
    model = nn.Linear(4, 4)
    served = TrackedState({"model": model}).serve(3)
    assert served.tensors["model/weight"].data_ptr() == model.weight.data_ptr()
    assert served.step == 3


def test_the_digest_tells_every_change() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrackedState({"model": model, "optimizer": optimizer})
    seen = {state.digest()}
    train(model, optimizer, 1)
    seen.add(state.digest())
    optimizer.param_groups[0]["lr"] = 0.1 + 1e-17  # the same float
    seen.add(state.digest())
    optimizer.param_groups[0]["lr"] = 0.10000000000000002
    seen.add(state.digest())
    with torch.no_grad():
        model.norm.bias[0] *= -1
    seen.add(state.digest())
    assert len(seen) == 4
    assert state.digest() == state.manifest(7).digest  # the step is no part of it


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"here/a/1: cannot serve a value of type builtins\.object"),
        ({1, 2}, r"here/a/1: cannot serve a value of type builtins\.set"),
        (random.Random, r"here/a/1: .*builtins\.type"),
        (Position(), r"here/a/1: .*Position"),
        ({None: 1}, r"here/a/1: a key of type builtins\.NoneType"),
        ({True: 1}, r"here/a/1: a key of type builtins\.bool"),
        ("\ud800", r"here/a/1: a str that is no Unicode text"),
        (torch.eye(3).to_sparse(), r"here/a/1: .*sparse"),
        (torch.empty(2, device="meta"), r"here/a/1: .*meta"),
        (torch.zeros(1).expand(4), r"here/a/1: .*share memory"),
        (torch.zeros(2, dtype=torch.complex64).conj(), r"here/a/1: .*conjugated"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(value: Any, said: str) -> None:
    state = TrackedState({"here": Position(a=[0, value])})
    with pytest.raises(UnsupportedState, match=said):
        state.manifest(0)


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedState, match="deep"):
        TrackedState({"here": Position(a=endless)}).manifest(0)


def test_an_object_without_the_two_methods_is_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"rng: a Generator has no state_dict\(\)"):
        TrackedState({"rng": torch.Generator()})


def test_a_snapshot_brings_back_what_a_forward_pass_changes() -> None:
    torch.manual_seed(0)
    model = Tied()
    state = TrackedState({"model": model, "data": Position(at=4, last=torch.ones(3))})
    before = state.digest()
    snapshot = state.snapshot()
    for _ in range(2):
        model(torch.randint(0, 17, (6,)))
        state.objects["data"].values["at"] += 1
        state.objects["data"].values["last"].add_(1)
        assert state.digest() != before
        assert state.digest(snapshot) == before  # what would be served
        state.restore(snapshot)
        assert state.digest() == before


def test_a_snapshot_is_taken_anew_each_time() -> None:
    model = Tied()
    state = TrackedState({"model": model})
    state.snapshot()
    model(torch.randint(0, 17, (6,)))
    here = state.digest()
    snapshot = state.snapshot()
    model(torch.randint(0, 17, (6,)))
    state.restore(snapshot)
    assert state.digest() == here


class _Replacing(nn.Module):
    seen: torch.Tensor
    cache: torch.Tensor
    later: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("later", None)
        self.calls = 0

    def forward(self) -> None:
        self.seen = self.seen + 1
        self.cache.add_(1)
        self.later = torch.ones(1)
        self.calls += 1

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "as tensor": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        assert int(state["as tensor"]) == state["calls"]
        self.calls = state["calls"]


def test_a_snapshot_covers_replaced_buffers_caches_and_extra_state() -> None:
    module = _Replacing()
    module()
    state = TrackedState({"module": nn.Sequential(module)})
    held = module.seen
    before = state.digest()
    snapshot = state.snapshot()
    module()
    assert state.digest(snapshot) == before != state.digest()
    state.restore(snapshot)
    assert module.seen is held
    assert module.calls == 1
    assert module.cache.tolist() == [1, 1]
    assert state.digest() == before


def test_a_buffer_of_two_modules_stays_one_tensor_in_the_snapshot() -> None:
    norm = nn.BatchNorm1d(8)
    state = TrackedState({"one": nn.Sequential(norm, norm), "two": norm})
    snapshot = state.snapshot()
    assert state.digest(snapshot) == state.digest()
    assert len(state.serve(0, snapshot).tensors) == 5


def test_what_the_update_alone_changes_is_in_no_snapshot() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrackedState(
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            "scaler": torch.amp.GradScaler("cpu"),
        }
    )
    snapshot = state.snapshot()
    assert not snapshot.objects
    assert not snapshot.buffers
    assert state.digest(snapshot) == state.digest()
