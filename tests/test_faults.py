"""The table of survived faults counts what it should."""

from types import SimpleNamespace

import faults
import pytest


def report(outcome, *properties):
    return SimpleNamespace(user_properties=[*properties], passed=outcome == "passed", skipped=outcome == "skipped")


KILL, DISK = ("fault", ["ranks die", "SIGKILL"]), ("fault", ["checkpoints", "disk full"])


def test_a_failed_try_is_not_survived_and_a_skipped_one_not_tried():
    table = faults.count([report("passed", DISK, ("survived", 50)), report("passed", KILL), report("failed", KILL),
                          report("skipped", KILL), report("passed")])
    assert list(table.items()) == [(("ranks die", "SIGKILL"), [2, 1, 1]), (("checkpoints", "disk full"), [50, 50, 0])]
    text = "\n".join(faults.lines(table))
    assert text.count("FAILED") == 1 and "52        51" in text and "(1 tests skipped)" in text


def test_without_faults_there_is_no_table():
    assert list(faults.lines(faults.count([report("passed")]))) == []


def test_a_section_that_is_not_in_the_table_is_refused():
    with pytest.raises(AssertionError):
        faults.fault("ranks dye", "SIGKILL")
