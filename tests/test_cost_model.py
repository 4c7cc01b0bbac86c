"""The cost model and the published runs; cost_model.ipynb itself compares the formulae."""

import math
import runpy
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import ROOT
from tolerances import ARITHMETIC, NETWORK_LARGEST, NETWORK_MEDIAN, NODE_LARGEST, NODE_MIXED_LARGEST

model = SimpleNamespace(**runpy.run_path(str(ROOT / "03_ddp" / "cost_model.py")))
pytestmark = pytest.mark.check


def errors(group):
    """Return the relative errors of images/s by the names of the runs."""
    rows = pd.read_csv(ROOT / "assets" / "records" / "published.csv").query("group == @group")
    images = [model.predict(row) for row in rows.to_dict("records")]
    return (images / rows.images_per_second - 1).abs().set_axis(rows.name)


def test_published_runs_over_a_network_and_in_a_node():
    network, node = errors("A"), errors("B")
    assert (len(network), len(node)) == (7, 11)  # nobody drops a run that does not fit
    assert network.median() <= NETWORK_MEDIAN and network.max() <= NETWORK_LARGEST
    mixed = node.index.str.contains("AMP")
    assert node[~mixed].max() <= NODE_LARGEST and node.max() <= NODE_MIXED_LARGEST


def test_the_slowest_of_n_ranks():
    assert model.slowest(1) == pytest.approx(0, abs=ARITHMETIC)
    exact = 1 / math.sqrt(math.pi)
    assert model.slowest(2) == pytest.approx(exact, rel=ARITHMETIC)
    assert model.slowest(3) == pytest.approx(1.5 * exact, rel=ARITHMETIC)
