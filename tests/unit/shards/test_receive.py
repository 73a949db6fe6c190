# SPDX-License-Identifier: Apache-2.0
"""A state taken apart and put together in other objects."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from protos import shards_pb2
from tests.unit.shards.objects import Position, Tied, train, transfer
from workerd.shards.errors import InvalidManifest, Mismatch
from workerd.shards.manifest import digest, validate
from workerd.shards.receive import Destination
from workerd.shards.state import TrackedState

Parameters = Iterator[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "lbfgs": torch.optim.LBFGS,
    "groups": lambda p: torch.optim.AdamW(
        [{"params": [one], "lr": 0.01 * index} for index, one in enumerate(p)]
    ),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def _trained(name: str, steps: int, seed: int = 0) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        tokens = torch.randint(0, 17, (6,))

        def closure(tokens: torch.Tensor = tokens) -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = model(tokens).logsumexp(1).mean()
            loss.backward()
            return float(loss)

        optimizer.step(closure)
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("steps_here", [0, 2], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_with_the_same_bits(name: str, steps_here: int) -> None:
    there = TrackedState(dict(zip("mo", _trained(name, 3), strict=True)))
    here = TrackedState(dict(zip("mo", _trained(name, steps_here, seed=1), strict=True)))
    transfer(there.serve(3), here)
    assert here.digest() == there.digest()
    for state in (there, here):
        torch.manual_seed(9)
        model, optimizer = state.objects["m"], state.objects["o"]
        if name != "lbfgs":
            train(model, optimizer, 2)
    assert here.digest() == there.digest()
    assert here.objects["m"].head.weight is here.objects["m"].embedding.weight


def test_what_is_there_already_is_written_in_place() -> None:
    there = TrackedState(dict(zip("mo", _trained("adam", 3), strict=True)))
    here = TrackedState(dict(zip("mo", _trained("adam", 2, seed=1), strict=True)))
    before = {name: t.data_ptr() for name, t in here.serve(0).tensors.items()}
    transfer(there.serve(3), here)
    assert {name: t.data_ptr() for name, t in here.serve(0).tensors.items()} == before


def test_an_optimizers_state_keeps_a_dtype_other_than_its_parameters() -> None:
    # torch's own load_state_dict would cast it to bfloat16.
    def make(fill: float) -> TrackedState:
        model = nn.Linear(3, 3).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        if fill:
            for parameter in model.parameters():
                average = torch.full(parameter.shape, fill, dtype=torch.float32)
                optimizer.state[parameter]["momentum_buffer"] = average
        return TrackedState({"model": model, "optimizer": optimizer})

    there, here = make(1.0000001), make(0)
    transfer(there.serve(1), here)
    assert here.digest() == there.digest()


def test_state_that_the_source_has_not_is_dropped() -> None:
    there = TrackedState(dict(zip("mo", _trained("adam", 0), strict=True)))
    here = TrackedState(dict(zip("mo", _trained("adam", 2, seed=1), strict=True)))
    transfer(there.serve(0), here)
    assert here.digest() == there.digest()
    assert not here.objects["o"].state


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_the_source_stands(name: str) -> None:
    def make(seed: int, steps: int) -> TrackedState:
        torch.manual_seed(seed)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = SCHEDULERS[name](optimizer)
        train(model, optimizer, steps, scheduler)
        return TrackedState({"m": model, "o": optimizer, "s": scheduler})

    there, here = make(0, 3), make(1, 0)
    transfer(there.serve(3), here)
    assert here.digest() == there.digest()
    for state in (there, here):
        torch.manual_seed(9)
        train(*(state.objects[key] for key in "mo"), 3, state.objects["s"])
    assert here.digest() == there.digest()


def test_any_value_of_an_object_arrives_as_it_is() -> None:
    shared = torch.arange(5)
    nan = float.fromhex("-0x1p-1074")
    values: dict[str, Any] = {
        "numbers": [0, -1, 1 << 200, True, 0.1, nan, float("inf"), 3j, None],
        "nested": {"a": ({1: "one", "1": "uno"}, []), "": OrderedDict(z=1, a=2)},
        "count": Counter("hello"),
        "bytes": b"\0\xff",
        "kinds": [torch.float16, torch.Size([2, 3]), torch.tensor(1.5), torch.zeros(0, 3)],
        "twice": [shared, shared],
        'path/like~"key': torch.ones(2),
    }
    there = TrackedState({"data": Position(**values)})
    here = TrackedState({"data": Position()})
    transfer(there.serve(0), here)
    got = here.objects["data"].values
    assert here.digest() == there.digest()
    assert got["numbers"] == values["numbers"]
    assert list(map(type, got["numbers"])) == list(map(type, values["numbers"]))
    assert got["nested"] == values["nested"]
    assert type(got["nested"][""]) is OrderedDict
    assert type(got["count"]) is Counter
    assert got["kinds"][:2] == values["kinds"][:2]
    assert got["twice"][0] is got["twice"][1]


def test_extra_state_and_layouts_arrive() -> None:
    class Extra(nn.Conv2d):
        note: Any = "here"

        def get_extra_state(self) -> Any:
            return {"note": self.note, "drawn": torch.full((2,), float(len(self.note)))}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]
            assert state["drawn"][0] == len(self.note)

    there_module, here_module = Extra(3, 5, 3), Extra(3, 5, 3)
    there_module.note = "a note from there"
    there_module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    here = TrackedState({"module": nn.Sequential(here_module)})
    there = TrackedState({"module": nn.Sequential(there_module)})
    transfer(there.serve(0), here)
    assert here_module.note == "a note from there"
    assert here.digest() == there.digest()
    assert here_module.weight.is_contiguous()


def test_a_wrapped_optimizer_loads_by_its_own_method() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self.param_groups = inner.param_groups
            self.loaded = 0

        def state_dict(self) -> dict[str, Any]:
            return {"inner": self.inner.state_dict(), "version": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded += 1
            self.inner.load_state_dict(state["inner"])

    def make(steps: int) -> TrackedState:
        model, optimizer = _trained("adam", steps)
        return TrackedState({"m": model, "o": Wrapper(optimizer)})

    there, here = make(3), make(0)
    assert not here.snapshot().objects
    transfer(there.serve(3), here)
    assert here.digest() == there.digest()
    assert here.objects["o"].loaded == 1


def _linear(**changes: Any) -> TrackedState:
    arguments = {"in_features": 4, "out_features": 3, "dtype": torch.float32, **changes}
    model = nn.Linear(**arguments)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    return TrackedState({"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (
            lambda: _linear(out_features=5),
            r"model/weight: the source has float32 \[3, 4\], here it is float32 \[5, 4\]",
        ),
        (
            lambda: _linear(dtype=torch.float16),
            r"model/weight: the source has float32 \[3, 4\], here it is float16 \[3, 4\]",
        ),
        (
            lambda: _linear(bias=False),
            r"model/bias: the source has float32 \[3\], here is no such tensor",
        ),
        (
            lambda: TrackedState({"model": nn.Linear(4, 3)}),
            r"the source tracks \['model', 'optimizer'\], here are tracked \['model'\]",
        ),
        (
            lambda: TrackedState(
                {
                    "model": nn.Sequential(OrderedDict(l=nn.Linear(4, 3))),
                    "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
                }
            ),
            r"model/weight: the source has .* here is no such tensor",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(
    here: Callable[[], TrackedState], said: str
) -> None:
    state = here()
    before = state.digest()
    with pytest.raises(Mismatch, match=said):
        Destination(state, _linear().manifest(0))
    assert state.digest() == before


def test_more_tensors_here_than_at_the_source_are_refused() -> None:
    with pytest.raises(Mismatch, match=r"model/bias: the source has no such tensor, here it is"):
        Destination(_linear(), _linear(bias=False).manifest(0))


def test_other_parameter_groups_are_refused() -> None:
    there, here = _linear(), _linear()
    here.objects["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(Mismatch, match=r"optimizer: parameters by group .*\[2\], here \[2, 1\]"):
        Destination(here, there.manifest(0))


def test_a_load_that_changes_what_arrived_is_noticed() -> None:
    class Casting(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict[f"{prefix}hidden"] = torch.zeros(3)

    class Hidden(Casting):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.hidden = torch.ones(3)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}hidden"] = self.hidden.clone()

    there, here = (TrackedState({"model": Hidden()}) for _ in range(2))
    there.objects["model"].hidden.fill_(5)
    with pytest.raises(Mismatch, match="model/hidden: does not hold what was loaded"):
        transfer(there.serve(0), here)


def _manifest() -> shards_pb2.Manifest:
    return copy.deepcopy(_linear().manifest(4))


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    validate(_manifest(), 4)
    spoil: dict[str, Callable[[shards_pb2.Manifest], Any]] = {
        "is of step 4, not of 5": lambda m: None,
        "the digest": lambda m: setattr(m, "skeleton", m.skeleton + " "),
        "digest": lambda m: setattr(m.tensors[0], "checksum", "0"),
        "unknown dtype: nothing": lambda m: setattr(m.tensors[0], "dtype", "nothing"),
        "unknown dtype: nn": lambda m: setattr(m.tensors[0], "dtype", "nn"),
        "shape": lambda m: m.tensors[0].shape.__setitem__(0, -3),
        "47 bytes": lambda m: setattr(m.tensors[0], "bytes", 47),
        "two tensors": lambda m: m.tensors.append(m.tensors[0]),
    }
    for said, change in spoil.items():
        manifest = _manifest()
        change(manifest)
        with pytest.raises(InvalidManifest, match=said):
            validate(manifest, 5 if "step" in said else 4)


@pytest.mark.parametrize(
    "skeleton",
    [
        "",
        "[1]",
        '{"model":1}',
        '[["model",["pickle","x"]],["optimizer",null]]',
        '[["model",["tensor","nothing"]],["optimizer",null]]',
        '[["model",{}],["optimizer",null]]',
        '[["model",["dict","a"]],["optimizer",null]]',
        '[["model",["dict",["list"],1]],["optimizer",null]]',
        '[["model",["float","zz"]],["optimizer",null]]',
        '[["model",["dtype","nn"]],["optimizer",null]]',
        "[" * 100_000,
        '[["model",' + '["list",' * 5_000 + "1" + "]" * 5_000 + '],["optimizer",null]]',
    ],
)
def test_a_skeleton_that_nobody_made_is_refused(skeleton: str) -> None:
    manifest = _manifest()
    manifest.skeleton = skeleton
    manifest.digest = digest(manifest)
    validate(manifest, 4)
    state = _linear()
    with pytest.raises((InvalidManifest, Mismatch)):
        Destination(state, manifest)


def test_a_mapping_with_a_default_is_refused_rather_than_changed() -> None:
    from workerd.shards.errors import UnsupportedState

    with pytest.raises(UnsupportedState, match="defaultdict"):
        TrackedState({"data": Position(a=defaultdict(int))}).manifest(0)
