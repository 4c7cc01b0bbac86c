"""The cost model predicts the published runs; cost_model.ipynb itself compares the formulae."""

import math
import runpy
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import ROOT
from tolerances import ARITHMETIC, NETWORK_LARGEST, NETWORK_MEDIAN, NODE_LARGEST, NODE_MIXED_LARGEST

cost_model = SimpleNamespace(**runpy.run_path(str(ROOT / "03_ddp" / "cost_model.py")))
pytestmark = pytest.mark.check


def errors(group):
    """Return the relative errors of the predicted images/s, by name of the run."""
    rows = pd.read_csv(ROOT / "assets" / "records" / "published.csv").query("group == @group")
    predictions = [cost_model.predict(row) for row in rows.to_dict("records")]
    return (predictions / rows.images_per_second - 1).abs().set_axis(rows.name)


def test_errors_of_the_published_runs():
    network, node = errors("A"), errors("B")
    assert (len(network), len(node)) == (7, 11)  # none may be left out
    assert network.median() <= NETWORK_MEDIAN and network.max() <= NETWORK_LARGEST
    has_amp = node.index.str.contains("AMP")
    assert node[~has_amp].max() <= NODE_LARGEST and node.max() <= NODE_MIXED_LARGEST


def test_expected_delay_of_the_slowest_rank():
    assert cost_model.slowest_delay(1) == pytest.approx(0, abs=ARITHMETIC)
    exact = 1 / math.sqrt(math.pi)
    assert cost_model.slowest_delay(2) == pytest.approx(exact, rel=ARITHMETIC)
    assert cost_model.slowest_delay(3) == pytest.approx(1.5 * exact, rel=ARITHMETIC)
