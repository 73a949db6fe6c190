# SPDX-License-Identifier: Apache-2.0
"""Any nested value comes back from its skeleton as it was, and no two places share a name."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import Counter, OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from workerd.shards.errors import InvalidManifest
from workerd.shards.tree import flatten, segment, unflatten

KEYS = st.one_of(st.integers(), st.text(max_size=6), st.from_regex(r"-?[0-9]{1,3}", fullmatch=True))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.integers(0, 1000).map(torch.tensor),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=20,
)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return _same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return _same(a.real, b.real) and _same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        return a is b
    return bool(a == b)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}

    def leaf(path: str, tensor: torch.Tensor) -> str:
        assert path not in tensors
        tensors[path] = tensor
        return path

    text = json.dumps(flatten(value, "object", leaf), allow_nan=False)
    assert text.isascii()
    assert _same(unflatten(json.loads(text), tensors), value)


@given(st.lists(KEYS, min_size=1, max_size=4), st.lists(KEYS, min_size=1, max_size=4))
def test_different_keys_never_make_the_same_name(one: list[Any], other: list[Any]) -> None:
    named = ["/".join(map(segment, keys)) for keys in (one, other)]
    typed = [[(type(key), key) for key in keys] for keys in (one, other)]
    assert (named[0] == named[1]) == (typed[0] == typed[1])


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
        | st.sampled_from(
            [
                *("list", "tuple", "dict", "ordered", "counter", "size", "tensor"),
                *("int", "float", "complex", "bytes", "dtype"),
            ]
        ),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=15,
    )
)
def test_any_json_is_a_value_or_refused(node: Any) -> None:
    with contextlib.suppress(InvalidManifest):
        unflatten(node, {})
