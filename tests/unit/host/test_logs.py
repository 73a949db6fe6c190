# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.host.logs import JournalHandler, leads_to_journal


class Journal:
    """journald's end of its own protocol."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "journal")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(30)

    def entry(self) -> dict[str, str]:
        data, fields = self._socket.recv(1 << 20), {}
        while data:
            line, _, data = data.partition(b"\n")
            name, equals, value = line.partition(b"=")
            if not equals:
                size = int.from_bytes(data[:8], "little")
                value, data = data[8 : 8 + size], data[9 + size :]
            fields[name.decode()] = value.decode()
        return fields

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path)
    yield made
    made.close()


def logger(handler: logging.Handler) -> logging.Logger:
    made = logging.Logger("hotspare.test")  # noqa: LOG001 - one without the others' handlers
    made.addHandler(handler)
    return made


def test_an_entry_has_its_priority_its_job_and_its_node(journal: Journal) -> None:
    log = logger(JournalHandler("workerd", "n0", io.StringIO(), journal.address))
    log.warning("no %s", "answer", extra={"job": "gpt"})
    entry = journal.entry()
    assert entry["MESSAGE"] == "no answer"
    assert entry["PRIORITY"] == "4"
    assert (entry["HOTSPARE_JOB"], entry["HOTSPARE_NODE"]) == ("gpt", "n0")
    assert (entry["SYSLOG_IDENTIFIER"], entry["LOGGER"]) == ("workerd", "hotspare.test")


def test_a_record_may_be_about_another_node_or_about_none(journal: Journal) -> None:
    log = logger(JournalHandler("coordinator", "", io.StringIO(), journal.address))
    log.info("probing", extra={"node": "n7", "job": ""})
    entry = journal.entry()
    assert entry["HOTSPARE_NODE"] == "n7"
    assert "HOTSPARE_JOB" not in entry
    log.info("elected")
    assert "HOTSPARE_NODE" not in journal.entry()


def test_lines_stay_one_entry_and_forge_no_field(journal: Journal) -> None:
    log = logger(JournalHandler("workerd", "n0", io.StringIO(), journal.address))
    log.error("first\nPRIORITY=7\nlast")
    entry = journal.entry()
    assert entry["MESSAGE"] == "first\nPRIORITY=7\nlast"
    assert entry["PRIORITY"] == "3"


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.CRITICAL, "2"), (logging.ERROR, "3"), (logging.INFO, "6"), (logging.DEBUG, "7")],
)
def test_priorities(journal: Journal, level: int, priority: str) -> None:
    logger(JournalHandler("workerd", "", io.StringIO(), journal.address)).log(level, "x")
    assert journal.entry()["PRIORITY"] == priority


def test_without_a_journal_the_lines_go_to_stderr_with_their_priority(tmp_path: Path) -> None:
    stderr = io.StringIO()
    log = logger(JournalHandler("workerd", "n0", stderr, str(tmp_path / "nobody")))
    log.error("first\nsecond")
    assert stderr.getvalue() == "<3>first\n<3>second\n"


def test_stderr_leads_to_the_journal_only_if_it_is_what_systemd_connected(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        found = os.fstat(stream.fileno())
        own = f"{found.st_dev}:{found.st_ino}"
        assert leads_to_journal({"JOURNAL_STREAM": own}, stream)
        assert not leads_to_journal({"JOURNAL_STREAM": own + "1"}, stream)
        assert not leads_to_journal({}, stream)
    assert not leads_to_journal({"JOURNAL_STREAM": own}, io.StringIO())
