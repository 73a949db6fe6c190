# SPDX-License-Identifier: Apache-2.0
"""A model that FSDP2 has sharded: the part of one rank is served, received, and used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.unit.shards.objects import transfer
from tests.unit.shards.places import Places, train
from workerd.shards.errors import Mismatch
from workerd.shards.state import TrackedState


@pytest.fixture
def places() -> Iterator[Places]:
    one = Places()
    yield one
    one.leave()


def local(state: TrackedState) -> dict[str, torch.Tensor]:
    return state.collect().tensors


def test_a_rank_serves_its_own_part(places: Places) -> None:
    rows = {}
    for position in (0, 1):
        model, optimizer, state = places.at(position)
        train(model, optimizer)
        parts = state.serve(2).tensors
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        assert parts["model/0.weight"].data_ptr() == weight.to_local().data_ptr()
        assert parts["optimizer/state/0/exp_avg"].shape == weight.to_local().shape
        assert "model/1.running_mean" in parts
        rows[position] = [parts[f"model/{name}"].shape[0] for name in ("0.weight", "2.weight")]
    assert rows == {0: [5, 1], 1: [4, 0]}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_part_arrives_in_place_and_trains_on(places: Places, position: int, steps: int) -> None:
    torch.manual_seed(1)
    model, optimizer, source = places.at(position)
    train(model, optimizer)
    digest = source.digest()
    served = source.serve(2)
    held = {name: tensor.clone() for name, tensor in served.tensors.items()}
    torch.manual_seed(2)
    train(model, optimizer)
    wanted = source.digest()

    other, others, target = places.at(position)
    torch.manual_seed(3)
    train(other, others, steps)  # as a rehearsal does
    before = {name: tensor.data_ptr() for name, tensor in local(target).items()}
    served = type(served)(2, held, served.skeleton)
    transfer(served, target)
    assert target.digest() == digest
    after = {name: tensor.data_ptr() for name, tensor in local(target).items()}
    assert {name: after[name] for name in before} == before
    for entry in others.state.values():
        assert isinstance(entry["exp_avg"], DTensor)
    torch.manual_seed(2)
    train(other, others)
    assert target.digest() == wanted


def test_the_part_of_another_position_does_not_fit(places: Places) -> None:
    _, _, source = places.at(0)
    served = source.serve(0)
    _, _, target = places.at(1)
    with pytest.raises(Mismatch, match=r"model/0\.weight"):
        transfer(served, target)


def _forward(model: Any) -> Callable[[], None]:
    loss: torch.Tensor = model(torch.randn(4, 6)).square().mean()
    return loss.backward


def test_serving_in_the_middle_of_a_pass_disturbs_nothing(places: Places) -> None:
    model, optimizer, state = places.at(0)
    train(model, optimizer)
    digest = state.digest()
    backward = _forward(model)
    gathered = model[2].weight
    assert not isinstance(gathered, DTensor)
    assert state.digest(state.snapshot()) != ""
    parameters = {n: t for n, t in local(state).items() if "running" not in n and "num_b" not in n}
    assert model[2].weight is gathered
    assert gathered.untyped_storage().size() > 0
    backward()
    assert isinstance(model[2].weight, DTensor)
    now = local(state)
    assert {n: t.data_ptr() for n, t in parameters.items()} == {
        n: now[n].data_ptr() for n in parameters
    }
    assert digest != state.digest()  # the running statistics
