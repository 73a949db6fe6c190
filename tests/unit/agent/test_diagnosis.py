# SPDX-License-Identifier: Apache-2.0
"""What kind of failure an ended trainer is, from what is known of its end."""

from __future__ import annotations

import signal

import pytest

from coordinator.model import FailureClass
from workerd.agent.diagnosis import diagnose, last_traceback, raised
from workerd.supervisor.evidence import Ending

FRAMES = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n    go()\n'
)


def raising(line: str) -> Ending:
    return Ending(code=1, stderr=f"a warning\n{FRAMES}{line}\n")


@pytest.mark.parametrize(
    ("ending", "failure", "cause"),
    [
        (raising("ValueError: no data"), FailureClass.SOFTWARE, "ValueError: no data"),
        (raising("KeyError: 'x'"), FailureClass.SOFTWARE, "KeyError: 'x'"),
        (
            raising("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
            FailureClass.SOFTWARE,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            raising("torch.AcceleratorError: CUDA error: device-side assert triggered"),
            FailureClass.SOFTWARE,
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
        ),
        (
            raising("RuntimeError: CUDA error: an illegal memory access was encountered"),
            FailureClass.UNKNOWN,
            "RuntimeError: CUDA error: an illegal memory access was encountered",
        ),
        (
            raising("RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            FailureClass.DEVICE,
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        ),
        (
            raising("ConnectionResetError: [Errno 104] reset"),
            FailureClass.NETWORK,
            "ConnectionResetError: [Errno 104] reset",
        ),
        (
            raising("torch.distributed.DistBackendError: NCCL error in: x.cpp:1"),
            FailureClass.NETWORK,
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:1",
        ),
        (
            raising("OSError: [Errno 28] No space left on device"),
            FailureClass.HOST,
            "OSError: [Errno 28] No space left on device",
        ),
        (raising("MemoryError"), FailureClass.HOST, "MemoryError"),
        (
            Ending(signal=signal.SIGKILL, oom_kills=1),
            FailureClass.HOST,
            "killed by the kernel: the host, or its cgroup, is out of memory",
        ),
        (
            Ending(signal=signal.SIGKILL, stderr="step 7"),
            FailureClass.UNKNOWN,
            "somebody sent it SIGKILL, not workerd",
        ),
        (
            Ending(signal=40),
            FailureClass.UNKNOWN,
            "somebody sent it signal 40, not workerd",
        ),
        (
            Ending(
                signal=signal.SIGSEGV,
                stderr="Fatal Python error: Segmentation fault\n\n"
                'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n',
            ),
            FailureClass.UNKNOWN,
            "it crashed, SIGSEGV: Fatal Python error: Segmentation fault",
        ),
        (
            Ending(signal=signal.SIGBUS),
            FailureClass.HOST,
            "bus error: a file or shared memory that it had mapped is gone",
        ),
        (
            Ending(code=127, stderr="workerd: cannot run 'nothing': No such file or directory"),
            FailureClass.SOFTWARE,
            "workerd: cannot run 'nothing': No such file or directory",
        ),
        (Ending(code=0), FailureClass.SOFTWARE, "its script came to its end before the job did"),
        (Ending(code=4, stderr="bad flag\n"), FailureClass.UNKNOWN, "bad flag"),
        (Ending(code=4), FailureClass.UNKNOWN, "it has left no word"),
    ],
)
def test_classes(ending: Ending, failure: FailureClass, cause: str) -> None:
    found = diagnose(ending, "", "", 5)
    assert (found.failure_class, found.cause) == (failure, cause)
    assert (found.code, found.signal, found.step) == (ending.code, ending.signal, 5)


def test_what_it_says_itself_comes_before_what_it_has_left() -> None:
    ending = Ending(code=1, stderr=raising("KeyError: 1").stderr, error_file="ValueError: 2")
    assert diagnose(ending, "TypeError: 3", "", 0).cause == "TypeError: 3"
    assert diagnose(ending, "", "", 0).cause == "ValueError: 2"


def test_who_was_ended_by_workerd_has_not_failed() -> None:
    found = diagnose(Ending(signal=signal.SIGKILL, oom_kills=3), "", "its place is taken", 0)
    assert found.failure_class is FailureClass.CLASS_UNSPECIFIED
    assert found.cause == "ended by workerd: its place is taken"
    slow = diagnose(Ending(signal=signal.SIGKILL), "ValueError: x", "it goes on", 0)
    assert (slow.failure_class, slow.cause) == (FailureClass.SOFTWARE, "ValueError: x")


def test_who_leaves_after_the_jobs_end_has_not_failed() -> None:
    found = diagnose(Ending(stderr="bye"), "", "", 9, released=True)
    assert (found.failure_class, found.cause) == (FailureClass.CLASS_UNSPECIFIED, "")
    late = diagnose(raising("OSError: disk full"), "", "", 9, released=True)
    assert (late.failure_class, late.cause) == (FailureClass.HOST, "OSError: disk full")


def test_the_last_of_chained_exceptions_is_the_cause() -> None:
    text = (
        f"{FRAMES}KeyError: 1\n\nDuring handling of the above exception, another exception "
        f"occurred:\n\n{FRAMES}    ^^^^\nRuntimeError: of two\nlines\n"
    )
    assert raised(text) == "RuntimeError: of two"
    assert last_traceback("noise\n" + text) == text[text.rindex("Traceback") :]
    assert last_traceback("noise") == raised("") == ""


def test_what_is_kept_is_bounded() -> None:
    found = diagnose(Ending(code=1, stderr="x" * 9000), "y" * 9000, "", 0)
    assert (len(found.message), len(found.traceback), len(found.cause)) == (2000, 2000, 300)
