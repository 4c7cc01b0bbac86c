"""What 02_horovod/allreduce.ipynb runs, draws and says: against sums worked out here, and with numbers made up to the
contrary."""

import json
import math
import re
import sys

import numpy as np
import pytest
from conftest import BIN, ROOT, execute
from tolerances import ARITHMETIC, COUNT

from tools.notebooks import allreduce


def start(ranks, *words):
    """The lines that so many ranks of the module print, without the order in which they do."""
    done = execute([BIN / "mpiexec", "-n", ranks, sys.executable, "-m", "tools.notebooks.allreduce", *words], cwd=ROOT,
                   timeout=60)
    assert done.code == 0, done.err
    return sorted(done.out.splitlines())


def made(seconds, ranks=2, cpus=2):
    """Records of one run, from {way: [seconds]} for sizes of 4 kB, 64 kB and 1 MB, as many as there are."""
    return [{"algorithm": name, "ranks": ranks, "bytes": 4096 * 16**k, "seconds": value, "least": value / 2,
             "most": 2 * value, "cpus": cpus, "bytes_sent": None}
            for name, values in seconds.items() for k, value in enumerate(values)]


def turning(ranks):
    """A ring's trace, worked out without sending: in step s rank r passes on the chunk that began at rank r - s."""
    held = [[2**rank] * ranks for rank in range(ranks)]
    found = [{"rank": rank, "holds": [held[rank]], "sends": []} for rank in range(ranks)]
    for step in range(2 * (ranks - 1)):
        first_round = step < ranks - 1
        before, held = held, [list(row) for row in held]
        for rank in range(ranks):
            chunk = (rank - step + (0 if first_round else ranks)) % ranks
            to = (rank + 1) % ranks
            held[to][chunk] = before[rank][chunk] + (before[to][chunk] if first_round else 0)
            found[rank]["sends"].append([chunk, to])
        for one, row in zip(found, held):
            one["holds"].append(row)
    return found


def test_the_ranks_average_their_gradients():
    equal = start(2, "average")
    assert all(re.search(r"own 32: .*all 650 equal to 1e-6: True", line) for line in equal) and len(equal) == 2
    unequal = start(2, "average", "40")
    assert [re.search(r"own (\d+): .*equal to 1e-6: (\w+)", line).groups() for line in unequal] == [
        ("24", "False"), ("40", "False")]
    averages = [re.search(r"average: (\S+)", line)[1] for line in equal + unequal]
    assert averages[0] == averages[1] != averages[2] == averages[3]


def test_the_trace_is_that_of_a_ring():
    assert allreduce.traced(start(3, "trace")) == turning(3)
    with pytest.raises(RuntimeError, match="mpiexec: not found"):
        allreduce.traced(["mpiexec: not found"])


def test_what_is_said_of_a_ring_follows_its_trace():
    said = allreduce.ring_sentence(turning(4))
    assert "6 steps a rank sends one chunk to the next rank: 6/4 S = 1.5 S" in said
    assert "After step 3 each rank holds 1 whole sum (rank 2: chunk 3); after step 6, 4 whole sums." in said
    other = turning(4)
    other[0]["sends"][0][1] = 2
    other[1]["holds"][6][0] = 7
    other[2]["holds"][3] = [15, 1, 2, 4]
    said = allreduce.ring_sentence(other)
    assert "another rank" in said and "(rank 2: chunk 0)" in said and "after step 6, 3 whole sums or more" in said
    assert len(allreduce.ring_frames(turning(4))) == 7


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_and_steps_of_each_way(ranks):
    """Counted message by message, with S = 1."""
    ring = [one["sends"] for one in turning(ranks)]
    assert allreduce.path("ring", ranks) == (len(ring[0]), pytest.approx(len(ring[0]) / ranks))
    assert allreduce.bytes_sent("ring", ranks) == pytest.approx(len(ring[0]) / ranks)
    messages = [(rank, other) for rank in range(ranks) for other in range(ranks) if rank != other]
    assert allreduce.bytes_sent("everyone_to_everyone", ranks) == sum(sender == 0 for sender, _ in messages)
    assert allreduce.path("everyone_to_everyone", ranks) == (1, sum(to == 0 for _, to in messages))
    through_0 = [message for message in messages if 0 in message]  # in, then out: its link carries all, in turn
    assert allreduce.bytes_sent("reduce_and_broadcast", ranks) == sum(sender == 0 for sender, _ in through_0)
    assert allreduce.path("reduce_and_broadcast", ranks) == (2, len(through_0))


def test_a_fit_finds_the_alpha_and_beta_that_made_the_times():
    alpha, beta = 3e-5, 2e-10
    rows = [(name, ranks, size, allreduce.modelled(name, ranks, size, alpha, beta))
            for name in allreduce.OURS for ranks in (2, 5) for size in (1e3, 1e6)]
    assert allreduce.modelled("ring", 5, 1e6, alpha, beta) == pytest.approx(8 * alpha + 8 / 5 * 1e6 * beta)
    found = allreduce.fitted(rows)
    assert found[:2] == pytest.approx((alpha, beta)) and found[2] == pytest.approx(0, abs=ARITHMETIC)
    slow = [*rows[:-1], (*rows[-1][:3], 2 * rows[-1][3])]
    assert allreduce.fitted(slow)[2][-1] < -0.3  # (model - measured) / measured


@pytest.mark.parametrize("other", allreduce.SIMPLE)
def test_at_the_crossing_two_ways_take_equally_long(other):
    for ranks in (4, 256):
        size = allreduce.crossing(other, ranks, 2e-5, 1e-10)
        ring, way = (allreduce.modelled(name, ranks, size, 2e-5, 1e-10) for name in ("ring", other))
        assert ring == pytest.approx(way)
        ring, way = (allreduce.modelled(name, ranks, 2 * size, 2e-5, 1e-10) for name in ("ring", other))
        assert ring < way
    link = 1e-10 * (255 - 510 / 256)  # of 255 S beside 510/256 S, seconds a byte
    found = allreduce.crossing("everyone_to_everyone", 256, 2e-5, 1e-10, each_pays=True)
    assert found == pytest.approx(255 * 2e-5 / link)
    assert allreduce.crossing("reduce_and_broadcast", 256, 2e-5, 1e-10, each_pays=True) == 0
    assert allreduce.crossing("everyone_to_everyone", 2, 2e-5, 1e-10) == math.inf
    assert allreduce.crossing("reduce_and_broadcast", 2, 2e-5, 1e-10) == 0


def test_the_network_figure_says_where_the_model_crosses():
    title = allreduce.network_figure(256, 20, 10).axes[0].get_title(loc="left")
    size = float(re.search(r"above ([\d.]+) kB", title)[1]) * 1024
    assert size == pytest.approx(509 * 20e-6 / ((255 - 510 / 256) * 1e-10), rel=COUNT)
    assert "never" in allreduce.network_figure(2, 20, 10).axes[0].get_title(loc="left")


def test_what_is_said_of_messages_follows_the_model():
    said = allreduce.message_sentence(256, 20, 10)
    size = 255 * 20e-6 / ((255 - 510 / 256) * 1e-10) / 1024
    assert f"is the fastest above {size:.0f} kB, and never slower" in said and "here 8." in said
    assert "(255 in everyone to everyone, 510 in reduce and broadcast, 510 in ring)" in said
    assert "is never the fastest" in allreduce.message_sentence(2, 20, 10)


def test_bus_bandwidth_is_the_rings_bytes_over_the_time():
    found = allreduce.bus_bandwidth(made({"ring": [1e-3, 2e-3]}, ranks=4), 4, "ring")
    assert found == {4096: pytest.approx(1.5 * 4096 / 1e-3 / 1e9), 65536: pytest.approx(1.5 * 65536 / 2e-3 / 1e9)}


def test_what_is_said_of_bus_bandwidth_follows_the_numbers():
    grows, falls = made({"ring": [1e-3, 1e-3]}), made({"ring": [1e-3, 32e-3]})
    said = allreduce.bandwidth_sentence(grows + made({"ring": [1e-3, 0.52e-3]}), grows)
    assert "about 20 times as large here and now, 20 to 30 times in the records: at least tenfold, yes." in said
    assert "waits for its steps" in said and "best" not in said
    said = allreduce.bandwidth_sentence(grows, falls)
    assert "about 0.5 times as large here and now, 20 times in the records: at least tenfold, not in every run." in said
    assert "waits" not in said and "Here the best is at 4 kB; beyond it other limits count" in said
    assert "tenfold, no." in allreduce.bandwidth_sentence(falls, falls)
    longer = made({"ring": [1e-3, 1e-3, 1e-3]})  # only sizes that both have are compared
    assert allreduce.bandwidth_sentence(longer, falls) == said


def test_what_is_said_of_the_fastest_follows_the_numbers():
    ways = "everyone_to_everyone", "reduce_and_broadcast", "ring"
    said = allreduce.fastest_sentence(made(dict(zip(ways, ([1, 9, 9], [2, 8, 8], [3, 7, 7]))), cpus=1), 2)
    assert said == ("2 ranks on 1 core: the fastest in every run is everyone to everyone at 4 kB, ring at 64 kB and "
                    "1 MB.")
    mixed = made(dict(zip(ways, ([9, 1], [8, 2], [1, 3])))) + 2 * made(dict(zip(ways, ([1, 1], [8, 2], [7, 3]))))
    said = allreduce.fastest_sentence(mixed, 2)  # at 4 kB the ring won once of three
    assert said.endswith("is everyone to everyone at 64 kB; at 4 kB no way is the fastest in every run.")
    never = made(dict(zip(ways, ([9], [8], [1])))) + made(dict(zip(ways, ([1], [8], [7]))))
    assert allreduce.fastest_sentence(never, 2).endswith("cores: at all sizes no way is the fastest in every run.")


def test_what_is_said_of_the_fits_follows_the_numbers():
    sizes = np.array([4096, 65536, 2**20])
    exact = {name: allreduce.modelled(name, 2, sizes, 1e-5, 1e-9) for name in allreduce.OURS}
    assert "by 0% in the median, and by 0% at most" in allreduce.fit_sentence(made(exact), 2)
    assert "for the three, by 0% in the median" in allreduce.fit_sentence(made(exact), 2)
    apart = exact | {"ring": 5 * exact["ring"]}  # each has a fit without an error, but no common one
    said = allreduce.fit_sentence(made(apart), 2)
    assert "by 0% in the median, and by 0% at most" in said and "three, by 0%" not in said
    exact["ring"] = exact["ring"] * [1, 3, 1]
    said = allreduce.fit_sentence(made(exact), 2)
    assert re.search(r"by 0% in the median, and by [3-9]\d% at most \(ring at 64 kB\)", said)
    rows = allreduce.fit_table(made(exact), 2).splitlines()
    assert rows[1].split() == ["everyone", "to", "everyone", "10", "1.0", "0%", "0%"]


def test_where_the_ring_is_faster():
    simple = {name: [1, 5, 9] for name in allreduce.SIMPLE}
    assert allreduce.ring_wins_from(made(simple | {"ring": [2, 4, 8]}), "reduce_and_broadcast", 2) == 65536
    assert allreduce.ring_wins_from(made(simple | {"ring": [0.5, 6, 8]}), "reduce_and_broadcast", 2) == 2**20
    assert allreduce.ring_wins_from(made(simple | {"ring": [0.5, 4, 10]}), "reduce_and_broadcast", 2) == math.inf
    sizes = np.array([4096, 65536, 2**20])
    times = {"ring": allreduce.modelled("ring", 4, sizes, 1e-4, 1e-9),
             "everyone_to_everyone": allreduce.modelled("everyone_to_everyone", 4, sizes, 1e-4, 2e-9)}
    found = allreduce.fit_crossing(made(times, ranks=4), "everyone_to_everyone", 4)
    assert 6e-4 + 1.5 * found * 1e-9 == pytest.approx(1e-4 + 3 * found * 2e-9)


def test_what_is_said_of_the_rates_follows_the_numbers():
    assert "factor of 4.0, the second by 1.0. So within one machine" in allreduce.rate_sentence(
        {(2, "ring"): (1, 3), (3, "ring"): (4, 3)})
    assert "factor of 1.0, the second by 2.0. So all bytes together say no more" in allreduce.rate_sentence(
        {(2, "ring"): (1, 3), (3, "ring"): (1, 6)})


def test_the_rates_of_the_records():
    """Of the first way: on N ranks (N-1) S one after the other, and N times that together."""
    found = allreduce.rates(allreduce.recorded())
    for ranks in (2, 3, 4):
        link, total = found[ranks, "everyone_to_everyone"]
        assert total == pytest.approx(ranks * link)


def test_one_ring_or_many():
    said = allreduce.one_or_many(3, 3e6, tensors=10, latency=1000, bandwidth=1)
    assert said.startswith("In one tensor 8 ms, tensor by tensor 44 ms.") and "4 steps, 4.0 ms" in said


def test_the_counts_of_the_records_lie_on_the_lines():
    """But for the zeros that a ring adds where N does not divide the tensor."""
    counts = [record for record in allreduce.recorded() if record["bytes_sent"]]
    assert {record["algorithm"] for record in counts} == set(allreduce.OURS)
    for record in counts:
        units = max(record["bytes_sent"]) / record["bytes"]
        most = 2 * 4 * (record["ranks"] - 1) / record["bytes"] if record["algorithm"] == "ring" else 0
        assert 0 <= units - allreduce.bytes_sent(record["algorithm"], record["ranks"]) <= most


@pytest.mark.parametrize(("size", "name"), [(100, "100 B"), (4096, "4 kB"), (1.5 * 2**20, "1.5 MB"), (2**30, "1 GB"),
                                            (128 * 2**20, "128 MB")])
def test_the_name_of_a_size(size, name):
    assert allreduce.sized(size) == name


def test_the_buffers_are_those_of_the_libraries():
    said = allreduce.fusion_sentence()
    assert "buckets, of about 25 MB" in said and "Horovod into a buffer, of up to 128 MB since 0.21" in said


def test_the_figures_show_what_they_are_given():
    records = allreduce.recorded()
    here = made({"ring": [1e-3, 2e-3], "gloo": [1e-3, 2e-3], "mpi": [1e-3, 2e-3]}, cpus=1)
    drawn = allreduce.bandwidth_figure(records, here)
    assert "2 ranks, 1 core" in drawn.axes[1].get_title(loc="left")
    eight = json.loads(json.dumps(made({"ring": [1]}, ranks=8)))
    eight[0]["bytes_sent"] = [7168] * 8  # 1.75 times 4096
    points = allreduce.bytes_figure(records + eight).axes[0].lines[-1].get_xydata()
    assert [8, 1.75] in points.tolist() and [4, 3] in points.tolist()
    assert "4 ranks" in allreduce.time_figure(4).get_suptitle()
