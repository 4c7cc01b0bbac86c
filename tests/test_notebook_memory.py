"""05_zero/memory.ipynb: its formulae against independent counts, and its sentences against contrary numbers."""

import re
from types import SimpleNamespace

import pytest
import torch
from tolerances import ARITHMETIC, ONE_DECIMAL
from torch import nn

from tools.notebooks import memory

MB = 10**6


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_model_state_is_the_paper_s(ranks):
    paper = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
    assert [memory.total(memory.state(stage, ranks)) for stage in range(4)] == pytest.approx(paper, rel=ARITHMETIC)


def test_the_paper_s_figure():
    found = [memory.total(memory.state(stage, 64, 7.5e9)) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


def test_ranks_needed_are_the_fewest():
    for size in memory.MODELS.values():
        for gpu in memory.GPUS.values():
            for room in (gpu, gpu / 2):
                for stage in range(4):
                    fitting = [ranks for ranks in range(1, 300)
                               if memory.total(memory.state(stage, ranks, size)) <= room]
                    assert memory.ranks_needed(size, room, stage) == (fitting[0] if fitting else None)


def test_the_lowest_stage_fits_and_the_one_below_does_not():
    seen = set()
    for size in memory.MODELS.values():
        for room in memory.GPUS.values():
            stage = memory.lowest_stage(size, room, 8)
            held = [memory.total(memory.state(each, 8, size)) for each in range(4)]
            assert (stage is None and min(held) > room) or (
                held[stage] <= room and all(each > room for each in held[:stage]))
            seen.add(stage)
    assert len(seen) == 5


@pytest.mark.parametrize(("sequence", "batch"), [(16, 1), (32, 3), (128, 2)])
@pytest.mark.parametrize("way", memory.WAYS)
def test_what_autograd_keeps_is_what_is_derived(sequence, batch, way):
    assert memory.counted_activations(sequence, batch, way) == memory.expected_activations(sequence, batch, way)


def test_another_network_keeps_other_bytes():
    """The count is not the formula in disguise."""
    x = torch.zeros(2, 16, memory.WIDTH)
    layer = memory.Layer(fused=False)
    derived = memory.kept_by_layer(16, 2, fused=False)
    assert memory.kept_for_backward(nn.ModuleList([layer]), x, False) == derived
    layer.gelu = nn.Sequential(nn.GELU(), nn.GELU())
    assert memory.kept_for_backward(nn.ModuleList([layer]), x, False) == derived + 4 * x.nbytes


def test_our_layer_is_the_published_one_without_dropout():
    """In 16 bits: less two masks of s b h bytes, a mask of the scores and their second copy; norms beside."""
    model = memory.Model(0, 1, memory.WIDTH, memory.HEADS)
    sequence, batch = 64, 2
    published, _ = memory.published_activations(model, sequence, batch, "plain attention")
    dropout = sequence * batch * (2 * memory.WIDTH + 3 * memory.HEADS * sequence)
    norms = 4 * 2 * sequence * batch
    assert memory.kept_by_layer(sequence, batch, fused=False) / 2 == published - dropout + norms


def test_published_activations_are_korthikanti_s():
    gpt3 = memory.GPTS["GPT-3 175B"]
    token = 2048 * 12288
    assert 5 * gpt3.heads * 2048 / gpt3.width == 80
    assert memory.published_activations(gpt3, 2048, 1, "plain attention") == (96 * 114 * token, 0)
    assert memory.published_activations(gpt3, 2048, 1, "fused attention") == (96 * 34 * token, 0)
    assert memory.published_activations(gpt3, 2048, 1, "fused + checkpointing") == (96 * 2 * token, 34 * token)


@pytest.mark.parametrize("model", memory.GPTS.values())
def test_the_shapes_of_the_published_models_make_their_parameters(model):
    """Without embeddings, which are at most a tenth."""
    assert 0.9 < 12 * model.layers * model.width**2 / model.parameters < 1.01


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_holds_what_autograd_keeps(fused):
    sequence, batch = 32, 2
    one = memory.FLOAT * sequence * batch * memory.WIDTH
    state = memory.counted_state()
    for checkpointed in (False, True):
        phases = memory.step(sequence, batch, fused, checkpointed)
        layer = memory.kept_by_checkpoint if checkpointed else lambda *sizes: memory.kept_by_layer(*sizes, fused)
        kept = memory.LAYERS * layer(sequence, batch) + one + memory.FLOAT  # the output, for the loss; the loss
        assert phases["forward"][-1] == state | {"gradients": 0, "activations": kept}
        assert phases["backward"][-1] == state | {"activations": memory.FLOAT}
        assert phases["optimizer"][-1] == state | {"gradients": 0, "activations": memory.FLOAT}
        assert memory.peak(phases) > sum(phases["forward"][-1].values())


def test_checkpointing_computes_a_forward_again_at_most():
    once, again = (memory.arithmetic(16, 1, checkpointed) for checkpointed in (False, True))
    assert 1.1 < again / once < 1.4


def test_gradients_of_tensors_in_two_shares():
    assert memory.elements_kept_whole([6, 4, 2], 1) == [12]
    assert memory.elements_kept_whole([6, 4, 2], 2) == [6, 6]
    assert memory.elements_kept_whole([4, 6, 2], 2) == [10, 8]
    record = memory.counted_stages(4)[2]
    assert sum(memory.sizes_of(record)) == record["parameters"]


def test_records_of_all_stages():
    for ranks in (1, 2, 4):
        for precision in ("bf16", "fp32"):
            assert [found["stage"] for found in memory.counted_stages(ranks, precision)] == [0, 1, 2, 3]


def rank(gradients, peak, state=1):
    return {"parameters": state, "gradients": gradients, "master copy": 0, "optimizer state": 0, "peak gradients": peak}


def stages(*rows):
    return [{"ranks": 8, "parameters": 2, "memory": [rank(*row)]} for row in rows]


@pytest.mark.parametrize(("first", "second", "said"), [
    (3, 3, "as many bytes of gradients as stage 2"), (5, 3, "more bytes of gradients than stage 2"),
    (1, 3, "fewer bytes of gradients than stage 2")])
def test_the_stages_in_words(first, second, said):
    text = memory.stages_in_words(stages((7, 8), (first, 10), (second, 6), (2, 4)))
    assert said in text and "on 8 ranks" in text and "1.50 of 4.00" in text and "5.00 and 3.00" in text


def test_the_deviation_in_words():
    def record(chapter, stage, counted):
        row = dict.fromkeys(memory.STATE, 0)
        return {"chapter": chapter, "stage": stage, "memory": [row | {"parameters": counted}],
                "memory_formula": row | {"parameters": 100}}

    found = [record("05_zero", stage, 100 + off) for stage, off in enumerate((0, 4, -9, 1))]
    found += [record("05_zero/fsdp.py", 1, 120), record("05_zero/fsdp.py", 3, 97)]
    assert re.findall(r"[+-][\d.]+ %", memory.deviation_in_words(found)) == [
        "+1.0000 %", "-9.0 %", "-3.00 %", "+20.0 %"]


def test_activations_in_words():
    kept = {"plain attention": (50 * MB, 0), "fused attention": (40 * MB, 0),
            "fused + checkpointing": (10 * MB, 5 * MB)}
    text = memory.activations_in_words(kept, kept, 100 * MB)
    assert "are equal" in text and "0.5 times the model state" in text and "keeps 20 % of them, and 30 % with" in text
    text = memory.activations_in_words(kept, kept | {"fused attention": (1, 0)}, 100 * MB)
    assert "differ (fused attention)" in text and "equal" not in text


def test_the_step_in_words():
    def phases(forward, backward):
        return {"forward": [{"parameters": forward * MB}], "backward": [{"parameters": backward * MB}]}

    text = memory.step_in_words(phases(30, 20), phases(10, 60), 1.5)
    assert "30 MB, in *forward*" in text and "60 MB, in *backward*: 200 %" in text and "1.50 times" in text


def test_a_model_in_words(monkeypatch):
    text = memory.model_in_words("GPT-2 1.5B", 1024, 8)
    assert "24 GB of model state" in text and "71.7 GB with plain attention (more than model state)" in text
    assert "21.4 GB with fused attention (less than" in text and "1.3 GB, and 0.4 GB for a layer again, with" in text
    assert "50,257 words: 0.8 GB in 16 bits" in text
    monkeypatch.setitem(memory.GPTS, "other", memory.Model(1e12, 1, 1, 1))
    text = memory.model_in_words("other", 10, 1)
    assert "1 sequence of 10 tokens" in text and "more" not in text


def test_figures_say_what_their_numbers_are():
    """The peak at stage 1 is the paper's number; a GPU's gigabytes are binary, the axis has decimal ones."""
    paper = memory.total(memory.state(1, 4))
    assert f"{paper:.2f}" in [text.get_text() for text in memory.draw_stages(4, "bf16").axes[0].texts]
    for model, side in (("GPT-2 1.5B", "right"), ("GPT-3 175B", "left")):
        label, = (text for text in memory.draw_model(model, 1024, 8, 1).axes[0].texts if "GiB" in text.get_text())
        assert label.get_text().strip() == "GPU: 80 GiB = 86 GB" and label.get_ha() == side


def test_the_ends_in_words(monkeypatch):
    assert "no number of GPUs is enough" in memory.ends_in_words()
    monkeypatch.setattr(memory, "MODELS", {"tiny": 1e9, "small": 30e9})
    text = memory.ends_in_words()
    assert "enough GPUs will do" in text and "60 GB" in text and text.endswith("a tiny is 16.0 GB: more than that "
                                                                               "ZeRO cannot save.")


def test_a_run_s_rows():
    printed = ["ranks: 2, nodes: 1", "bytes between backward", "        parameters   gradients",
               "rank 0  1,000 2 3 4 1,009 6 7", "formula 1,000 2 3 9 1,014 6 7", "test accuracy 0.5"]
    rows = memory.rows_of(printed)
    assert rows["rank 0"] == {"parameters": 1000, "gradients": 2, "master copy": 3, "optimizer state": 4, "sum": 1009,
                              "peak parameters": 6, "peak gradients": 7}
    assert list(rows) == ["rank 0", "formula"] and memory.furthest(rows) == 5
    rows["formula"]["peak gradients"] = 1007
    text = memory.rest_in_words(rows)
    assert "peak gradients: rank 0 7, formula 1,007\n" in text and "furthest from the formula: 1,000 bytes" in text
    with pytest.raises(ValueError, match="not ended well"):
        memory.rows_of(["mpiexec: command not found"])


def test_figures_are_drawn_at_the_ends_of_their_sliders():
    """Nothing is drawn outside its axis, where nobody sees it."""
    for figure in (memory.draw_stages(1, "fp32"), memory.draw_activations(64, 1), memory.draw_step(64, 1, "fused"),
                   memory.draw_model("GPT-3 175B", 8192, 16, 512), memory.draw_model("GPT-2 1.5B", 1024, 1, 512),
                   memory.draw_ranks(0.34, "H200 141", 100), memory.draw_ranks(175, "V100 16", 25),
                   memory.draw_grid(256, 25)):
        for axis in figure.axes:
            limits = SimpleNamespace(x=sorted(axis.get_xlim()), y=sorted(axis.get_ylim()))
            for bar in (patch for container in axis.containers for patch in container):
                assert bar.get_x() >= limits.x[0] and bar.get_x() + bar.get_width() <= limits.x[1]
                assert bar.get_y() >= limits.y[0] and bar.get_y() + bar.get_height() <= limits.y[1]
