"""The table of survived faults, which pytest prints at its end: what was tried, and how often it was survived.

    @fault("ranks die", "SIGKILL")     # this test, and each of its cases, is one try
    survived(rows)                     # the fixture: this one tried so many
"""

from collections import defaultdict

import pytest

SECTIONS = ("ranks die", "checkpoints", "elastic", "many at once", "data", "bad input", "places", "security")


def fault(section, row):
    """The mark of a test that tries this fault. A row is one kind of it."""
    assert section in SECTIONS, section
    return pytest.mark.fault(section, row)


def mark(items):
    """Note the row in what pytest's workers report. Called once for all tests."""
    for item in items:
        item.user_properties += [("fault", mark.args) for mark in item.iter_markers("fault")]


@pytest.fixture
def survived(request):
    """A function to call when a test has tried several: with how many it has survived."""
    return lambda count: request.node.user_properties.append(("survived", count))


def count(reports):
    """(section, row) and how many were tried, survived and skipped, in the order of SECTIONS.

    reports: of pytest, the deciding one of each test. A test that fails has survived nothing.
    """
    table = defaultdict(lambda: [0, 0, 0])
    for report in reports:
        tries = sum(value for name, value in report.user_properties if name == "survived") or 1
        for name, value in report.user_properties:
            if name == "fault":
                row = table[tuple(value)]
                row[0] += 0 if report.skipped else tries
                row[1] += tries if report.passed else 0
                row[2] += report.skipped
    return dict(sorted(table.items(), key=lambda item: SECTIONS.index(item[0][0])))


def lines(table):
    """The table's lines; none where no fault was tried."""
    if not table:
        return
    width = max(len(row) for _, row in table)
    yield f"{'':14} {'fault':{width}} {'tried':>6} {'survived':>9}"
    for (section, row), (tried, survived, skipped) in table.items():
        said = "  FAILED" * (survived < tried) + f"  ({skipped} tests skipped)" * (skipped > 0)
        yield f"{section:14} {row:{width}} {tried:6} {survived:9}{said}"
    tried, survived, _ = map(sum, zip(*table.values()))
    yield f"{'':14} {'all':{width}} {tried:6} {survived:9}"
