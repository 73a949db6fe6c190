# SPDX-License-Identifier: Apache-2.0
"""What the kernel and its own files say about an ended process: of real ones."""

from __future__ import annotations

import json
import os
import queue
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workerd.supervisor import evidence
from workerd.supervisor.evidence import Ending
from workerd.supervisor.runtime import RuntimeFolder
from workerd.supervisor.trainers import ProcessCleared, ProcessEnded, ProcessEvent, Supervisor

SECONDS = 60.0
CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),
)
RunToTheEnd = Callable[..., Ending]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunToTheEnd]:
    """Run a command as a trainer, and tell how it has ended."""
    folder = RuntimeFolder(tmp_path / "runtime")
    events: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
    supervisor = Supervisor(folder, uuid.uuid4().hex, events.put)

    def to_the_end(*command: str) -> Ending:
        # Its own: whatever has an ended instance's name in its environment is killed.
        instance = uuid.uuid4().hex
        folder.trainer(instance)
        supervisor.start(instance, command, {}, str(tmp_path))
        assert events.get(timeout=SECONDS) == ProcessEnded(instance)
        ending = supervisor.ended(instance)
        assert events.get(timeout=SECONDS) == ProcessCleared(instance)
        supervisor.reap(instance)
        return ending

    yield to_the_end
    supervisor.close()
    folder.close()


def test_exit_code_and_last_words(run: RunToTheEnd) -> None:
    assert run("sh", "-c", "echo so long >&2; exit 7") == Ending(code=7, stderr="so long")


def test_a_crash_leaves_pythons_stack_and_a_core(run: RunToTheEnd, tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import ctypes\ndef deep():\n    ctypes.string_at(0)\ndeep()\n")
    ending = run("sh", "-c", f"ulimit -c unlimited; exec {sys.executable} {script}")
    assert (ending.code, ending.signal) == (0, 11)
    assert "Fatal Python error: Segmentation fault" in ending.stderr
    assert "crash.py" in ending.stderr
    if evidence.CORE_PATTERN.read_text().startswith("|"):
        assert ending.core.startswith("given to /")
    else:
        assert Path(ending.core).read_bytes()[:4] == b"\x7fELF", ending.core


def test_what_elastics_record_has_left(run: RunToTheEnd) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('no data')\nmain()\n"
    )
    ending = run(sys.executable, "-c", script)
    assert ending.code == 1
    assert ending.error_file.startswith("Traceback")
    assert ending.error_file.rstrip().endswith("ValueError: no data")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (json.dumps({"message": "plain"}), "plain"),
        (json.dumps({"message": {"message": "ValueError: x"}}), "ValueError: x"),
        ("not json", "not json"),
        ('{"message": 5}', '{"message": 5}'),
        ('["message"]', '["message"]'),
        ("[" * 100_000, "[" * 100_000),
        ("\x00\ufffd", "\x00\ufffd"),
    ],
)
def test_any_error_file_can_be_read(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "error").write_text(text, encoding="utf-8")
    assert evidence.error_file(tmp_path / "error") == found
    assert evidence.error_file(tmp_path / "none") == ""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup that may hold 40 MiB."""
    why = "no memory cgroup is mounted"
    for parent, limit in CGROUPS:
        if not (parent / "cgroup.procs").exists():
            continue
        made = parent / f"hotspare-test-{os.getpid()}"
        try:
            made.mkdir()
            try:
                (made / limit).write_text(str(40 << 20))
            except OSError:
                made.rmdir()
                raise
        except OSError as error:
            why = f"cannot make a memory cgroup: {error}"
            continue
        yield made
        made.rmdir()
        return
    pytest.skip(why)


def test_the_kernels_kills_for_memory_are_counted(run: RunToTheEnd, cgroup: Path) -> None:
    script = (
        f"import os; open('{cgroup}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "grown = bytearray(400 << 20)\n"
    )
    ending = run(sys.executable, "-c", script)
    assert ending.signal == 9
    assert ending.oom_kills >= 1
