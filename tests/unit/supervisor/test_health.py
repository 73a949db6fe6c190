# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from coordinator.model import Device, DeviceKind
from workerd.health import devices
from workerd.health.rate import StepRate, StepTime

LISTING = """\
0, GPU-aa11, NVIDIA H200, 143771
1, GPU-bb22, NVIDIA H200, 143771
2, GPU-cc33, NVIDIA GB10, [N/A]
"""


def test_every_gpu_is_a_device() -> None:
    found = devices.parse(LISTING, None)
    assert found[0] == Device(DeviceKind.CUDA, 0, "NVIDIA H200", 143771 * 2**20)
    assert [(one.index, one.memory_bytes > 0) for one in found] == [
        (0, True),
        (1, True),
        (2, False),
    ]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,0", ["NVIDIA GB10", "NVIDIA H200"]),
        ("GPU-cc", ["NVIDIA GB10"]),
        ("0,9,1", ["NVIDIA H200"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_are_numbered_as_trainers_see_them(visible: str, names: list[str]) -> None:
    found = devices.parse(LISTING, visible)
    assert [one.name for one in found] == names
    assert [one.index for one in found] == list(range(len(names)))


def test_cpu_devices_share_the_memory() -> None:
    one, *_ = found = devices.find("cpu:4")
    assert [(each.kind, each.index) for each in found] == [
        (DeviceKind.CPU, index) for index in range(4)
    ]
    assert one.memory_bytes > 0


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(devices.find("auto")) == 1
    with pytest.raises(devices.DeviceError, match="nvidia-smi shows none"):
        devices.find("cuda")
    with pytest.raises(ValueError, match="must be auto, cuda or cpu:K"):
        devices.find("gpu")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = StepRate()
    assert rate.per_second() == 0
    for second in range(31):
        rate.observe(float(second), second * 2 if second <= 10 else 20 + (second - 10) * 4)
    assert rate.per_second() == pytest.approx(4.0)
    rate.observe(31.0, 3)
    assert rate.per_second() == 0, "it was put back"
    rate.observe(33.0, 5)
    assert rate.per_second() == pytest.approx(1.0)


def test_a_place_that_stands_still_slows_down() -> None:
    rate = StepRate()
    rate.observe(0.0, 0)
    rate.observe(1.0, 10)
    rate.observe(5.0, 10)
    assert rate.per_second() == pytest.approx(2.0)


def test_the_usual_step_is_not_changed_by_one_that_takes_long() -> None:
    time = StepTime()
    for second in range(3):
        time.observe(float(second), second * 4)
        assert time.usual() == 0, "not known yet"
    time.observe(3.0, 12)
    assert time.usual() == 0.25
    for moment in range(4, 100):
        time.observe(float(moment), 12)
    time.observe(100.0, 13)
    assert time.usual() == 0.25
    time.observe(101.0, 5)
    time.observe(103.0, 6)
    assert time.usual() == 0.25, "it was put back, and goes on"
    time.clear()
    assert time.usual() == 0
