# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import stat
from pathlib import Path

import pytest

from workerd.supervisor.runtime import KEPT, RuntimeFolder, RuntimeFolderError


def test_a_folder_is_private_and_for_one(tmp_path: Path) -> None:
    folder = RuntimeFolder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with pytest.raises(RuntimeFolderError, match="another workerd is using it"):
        RuntimeFolder(folder.path)
    folder.close()
    RuntimeFolder(folder.path).close()


def test_what_an_earlier_workerd_left_is_cleared(tmp_path: Path) -> None:
    before = RuntimeFolder(tmp_path)
    (before.trainer("old") / "page").touch()
    before.socket.touch()
    before.close()
    after = RuntimeFolder(tmp_path)
    assert not after.socket.exists()
    assert list((tmp_path / "trainers").iterdir()) == []
    after.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFolderError, match="file/x"):
        RuntimeFolder(tmp_path / "file" / "x")


def test_last_words_are_bounded(tmp_path: Path) -> None:
    folder = RuntimeFolder(tmp_path)
    folder.trainer("t")
    stderr = folder.output("t", "stderr")
    assert "can't be read" in folder.last_words("t")
    stderr.write_bytes(b"\xff first\n" + b"".join(b"line %d\n" % one for one in range(100)))
    words = folder.last_words("t").splitlines()
    assert (len(words), words[-1]) == (20, "line 99")
    stderr.write_bytes(b"x" * 100_000)
    assert folder.last_words("t") == "x" * 2000
    folder.close()


def test_output_of_ended_trainers_stays_for_a_while(tmp_path: Path) -> None:
    folder = RuntimeFolder(tmp_path)
    for number in range(KEPT + 2):
        (folder.trainer(str(number)) / "page").touch()
        folder.retire(str(number))
        assert not folder.page(str(number)).exists()
    left = {one.name for one in (tmp_path / "trainers").iterdir()}
    assert left == {str(number) for number in range(2, KEPT + 2)}
    folder.close()
