"""The benchmark compares like with like: the port learns and searches as it should, and the work is counted exactly."""

import json

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import gradient_variance, training
from benchmarks.common_port import CommonPort, port_beam_search, port_loss
from benchmarks.decoding import decode
from benchmarks.models import Data, Sizes, our_module
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, Timing, interleave
from captioning.precision import has_bfloat16_products
from captioning.vocabulary import END, START

CPU = torch.device("cpu")
KERNELS = ("additive_score", "summed_likelihood")
SIZES = Sizes(3, (4, 2, 3), 9, 6, 5, 7, 8, 23)


def port(**changes) -> CommonPort:
    torch.manual_seed(4)
    sizes = {"vocabulary_size": 23, "annotation_dim": 6, "attention_dim": 5, "embedding_dim": 7, "hidden_dim": 8}
    return CommonPort(**(sizes | changes))


# The common port


@torch.no_grad()
def test_the_ports_loss_is_that_of_each_caption_alone():
    data = Data.make(SIZES, CPU)
    model = port().eval()
    annotations = data.annotations.float()
    nll, penalty, words = 0.0, 0.0, 0
    for caption, length, image in zip(data.captions, data.lengths.tolist(), annotations, strict=True):
        h, c = model.start(image.unsqueeze(0))
        seen = torch.zeros(1, SIZES.locations)
        for t in range(length):
            logits, h, c, alphas = model.step(model.embedding(caption[t : t + 1]), image.unsqueeze(0), h, c)
            nll -= float(logits.log_softmax(1)[0, caption[t + 1]])
            seen += alphas
            words += 1
        penalty += float(((1 - seen) ** 2).mean())
    loss = port_loss(model(annotations, data.captions, data.lengths), data.captions)
    assert float(loss) == pytest.approx(nll / words + penalty / len(data.lengths), rel=1e-5)


def test_a_beam_of_one_in_the_port_is_greedy():
    model = port().eval()
    annotations = Data.make(SIZES, CPU).annotations[:1].float()
    h, c = model.start(annotations)
    word, expected = torch.tensor([START]), []
    with torch.no_grad():
        for _ in range(6):
            logits, h, c, _ = model.step(model.embedding(word), annotations, h, c)
            word = logits.argmax(1)
            if int(word) == END:
                break
            expected.append(int(word))
    ids, alphas = port_beam_search(model, annotations, beam_size=1, max_length=6)
    assert ids == [word for word in expected if word != START]
    torch.testing.assert_close(alphas.sum(1), torch.ones(len(alphas)))


# What is compared


@pytest.mark.parametrize("beam_size", [1, 3])
def test_fixed_lengths_are_the_lengths_of_our_captions(beam_size):
    data = Data.make(SIZES._replace(image_count=5, lengths=(4, 2, 8, 3, 8)), CPU)
    captioner = our_module(SIZES, CPU).eval().captioner
    captions = decode(captioner, data.annotations, data.lengths - 1, beam_size=beam_size)
    assert [[len(h.ids) for h in image] for image in captions] == [[n - 1] * beam_size for n in (4, 2, 8, 3, 8)]
    assert all(h.finished for image in captions for h in image)


# Measuring and reporting


def test_subjects_take_turns_in_both_directions():
    called: list[str] = []
    subjects = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    timings = interleave(subjects, Setup(CPU, True, 3), warm_up=1)
    assert "".join(called) == "ab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_a_report_holds_every_ratio_by_name():
    rows = [
        Row("step", "sizes", Timing((2.0,)), Timing((6.0,)), items=8),
        Row("epoch", "", Timing((0.5,)), items=30, unit="tokens"),
    ]
    report = Report(rows)
    rows.append(Row("kernel", "", Timing((2.0,)), Timing((8.0,)), other_name="plain_formula"))
    content = report.to_dict()
    assert content["vs_plain_formula"] == {"kernel": 4.0}
    assert content["vs_common_port"] == {"step": 3.0}
    assert content["seconds"] == {"step": 2.0, "step_common_port": 6.0, "epoch": 0.5} | {
        "kernel": 2.0,
        "kernel_plain_formula": 8.0,
    }
    assert content["per_second"] == {"step": {"images": 4.0}, "epoch": {"tokens": 60.0}}
    assert report.table().row_count == 3


@pytest.mark.slow
def test_the_benchmark_writes_every_subject(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "benchmark.json"
    bench.main(["--quick", "--rounds", "1", "--json", str(file)])
    content = json.loads(file.read_text())
    sizes = ("512", "2048")
    steps = {f"train_step_{size}_{kind}" for size in (*sizes, "512_mixed", "1280_mixed") for kind in ("fp32", "bf16")}
    searches = {f"{strategy}_{size}" for size in sizes for strategy in ("greedy", "beam3", "beam5")}
    searches |= {f"{name}_one_at_a_time" for name in searches}
    kinds = ("fp32", "bf16") if has_bfloat16_products() else ()
    others = {f"train_step_512_{model}_{kind}" for model in training.MODELS if model != "soft" for kind in kinds}
    assert set(content["vs_common_port"]) == steps | searches
    assert others <= set(content.get("vs_soft_attention", {}))
    assert set(content["vs_plain_formula"]) == {
        f"kernel_{name}_{kind}" for name in KERNELS for kind in ("fp32", "bf16")
    }
    assert all(ratio > 0 for key in ("vs_common_port", "seconds") for ratio in content[key].values())
    assert {"command", "commit", "machine", "software", "date"} <= set(content["provenance"])
    assert "beam5_2048" in capsys.readouterr().out


def test_gradient_variances_have_ratios_to_no_baseline():
    batch = Data.make(SIZES, CPU).batch()
    values = gradient_variance.measure(our_module(SIZES, CPU).captioner, batch, [batch], draws=3)
    assert values.keys() > gradient_variance.ESTIMATORS.keys()
    assert values["none"]["ratio"] == values["none"]["score_ratio"] == 1
    assert values["leave one out, 4 draws, to go"]["rows"] == 4
    assert all(value["variance"] > value["score_variance"] > 0 for value in values.values())
