# SPDX-License-Identifier: Apache-2.0
"""Why a trainer has ended, and what kind of failure that is. Pure."""

from __future__ import annotations

import re
import signal
from typing import Final

from coordinator.model import FailureClass, TrainerExit
from workerd.supervisor.evidence import Ending

_LONGEST: Final = 2000  # characters of a text that goes into the node's record
_LONGEST_CAUSE: Final = 300
_BEGINNINGS: Final = ("Traceback (most recent call last):", "Fatal Python error: ")

# What the CUDA runtime says of a broken device, a broken link to it, or one that is gone. Others of
# its errors (illegal address, launch failure) are as often the script's.
# Source: cudaError_t in the CUDA Runtime API's reference.
_DEVICE: Final = re.compile(
    "uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|"
    "no CUDA-capable device is detected|CUDA-capable device\\(s\\) is/are busy or unavailable|"
    "system not yet initialized|GPU is lost|fallen off the bus",
    re.IGNORECASE,
)
_CUDA: Final = re.compile("CUDA error|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error", re.IGNORECASE)
_ASSERTED: Final = "device-side assert"
_NETWORK: Final = re.compile(
    "NCCL error|ncclSystemError|ncclRemoteError|ncclUnhandledCudaError|"
    "Temporary failure in name resolution|Name or service not known|No route to host|"
    "Network is unreachable",
    re.IGNORECASE,
)
_NETWORK_TYPES: Final = frozenset(
    {
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "BrokenPipeError",
        "TimeoutError",
        "DistNetworkError",
        "DistBackendError",
        "gaierror",
        "herror",
        "URLError",
        "HTTPError",
        "ReadTimeout",
        "ConnectTimeout",
        "SSLError",
    }
)
# Errors of the system that the script runs on, and not of the script: another host may do better.
_HOST_TYPES: Final = frozenset(
    {"OSError", "IOError", "MemoryError", "FileNotFoundError", "PermissionError", "BlockingIOError"}
)
_CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_NOT_RUN: Final = frozenset({126, 127})  # the exit codes of exec_shim, with its words
_SHIM: Final = "workerd: "


def diagnose(
    ending: Ending, told: str, ended_by: str, step: int, *, released: bool = False
) -> TrainerExit:
    """What is reported of an ended trainer.

    ``told`` is the traceback that it has sent itself, ``ended_by`` why workerd has ended it, if it
    has, ``step`` the step of the state that it held, and ``released`` whether its job was over.
    """
    traceback = (told or ending.error_file or last_traceback(ending.stderr)).strip()
    if ended_by and not told:
        found = FailureClass.CLASS_UNSPECIFIED, f"ended by workerd: {ended_by}"
    elif released and not traceback and not (ending.code or ending.signal):
        found = FailureClass.CLASS_UNSPECIFIED, ""
    else:
        found = _classed(ending, traceback, ended_by)
    failure, cause = found
    return TrainerExit(
        code=ending.code,
        signal=ending.signal,
        message=ending.stderr[-_LONGEST:],
        failure_class=failure,
        cause=cause[:_LONGEST_CAUSE],
        traceback=traceback[-_LONGEST:],
        core=ending.core,
        step=step,
    )


def last_traceback(text: str) -> str:
    """The last traceback in a text, of Python or of its fault handler; empty when there is none."""
    at = max(text.rfind(beginning) for beginning in _BEGINNINGS)
    return text[at:] if at >= 0 else ""


def raised(traceback: str) -> str:
    """The line of a traceback that names the exception."""
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    for line in lines[frames[-1] :] if frames else ():
        if line and not line[0].isspace():
            return line
    named = [line for line in lines if line.startswith(_BEGINNINGS[1])] or lines[-1:]
    return named[-1] if named else ""


def _classed(ending: Ending, traceback: str, ended_by: str) -> tuple[FailureClass, str]:
    killed = ending.signal == signal.SIGKILL and not ended_by
    if killed and ending.oom_kills:
        return FailureClass.HOST, "killed by the kernel: the host, or its cgroup, is out of memory"
    if ending.signal == signal.SIGBUS:
        return FailureClass.HOST, "bus error: a file or shared memory that it had mapped is gone"
    line = raised(traceback) or "".join(ending.stderr.strip().splitlines()[-1:])
    for pattern, failure in ((_DEVICE, FailureClass.DEVICE), (_NETWORK, FailureClass.NETWORK)):
        if found := pattern.search(traceback or ending.stderr):
            return failure, _with(line, found[0])
    if ending.signal in _CRASHES:
        return FailureClass.UNKNOWN, f"it crashed, {_name(ending.signal)}: {line}"
    if ending.signal and not traceback:
        return FailureClass.UNKNOWN, f"somebody sent it {_name(ending.signal)}, not workerd"
    if traceback:
        return _of_exception(line, traceback), line
    if ending.code in _NOT_RUN and line.startswith(_SHIM):
        return FailureClass.SOFTWARE, line
    if ending.code == 0:
        return FailureClass.SOFTWARE, "its script came to its end before the job did"
    return FailureClass.UNKNOWN, line or "it has left no word"


def _name(number: int) -> str:
    named = number in set(signal.Signals)
    return signal.Signals(number).name if named else f"signal {number}"


def _of_exception(line: str, traceback: str) -> FailureClass:
    name = line.partition(":")[0].rpartition(".")[2]
    if name in _NETWORK_TYPES:
        return FailureClass.NETWORK
    if name in _HOST_TYPES:
        return FailureClass.HOST
    if _CUDA.search(line) and _ASSERTED not in line:
        return FailureClass.UNKNOWN
    return FailureClass.SOFTWARE


def _with(line: str, words: str) -> str:
    return line if words.lower() in line.lower() else f"{words}: {line}"
