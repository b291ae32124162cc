"""The benchmark compares like with like: the port learns and searches as it should, and the work is counted exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks.outputs import KINDS
from helpers import load_script
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import coco, epoch
from benchmarks.common_port import CommonPort, port_beam_search, port_loss, port_training_step
from benchmarks.decoding import decode
from benchmarks.memory import peak_of_a_step
from benchmarks.models import Data, natural_lengths, our_module
from benchmarks.report import Report, Row
from benchmarks.timing import Timing, interleave
from benchmarks.work import Machine, Sizes, Work, decoder_flops, decoder_products, parameters, training_bytes
from captioning.attention import AdditiveScore, SoftAttention
from captioning.data import CocoSource
from captioning.model import AttentionDecoder
from captioning.objective import reductions
from captioning.vocabulary import END, START, Vocabulary

CPU = torch.device("cpu")
script = load_script("benchmark")
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


def test_the_ports_loss_goes_down():
    data = Data.make(SIZES, CPU)
    model = port(dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    annotations = data.annotations.float()
    seen = [float(port_training_step(model, optimizer, annotations, data.captions, data.lengths)) for _ in range(25)]
    assert seen[-1] < seen[0] - 1.5


def test_the_ports_gradients_are_clamped():
    data = Data.make(SIZES, CPU)
    model = port()
    with torch.no_grad():
        model.output.weight.mul_(1e4)  # gradients far beyond the bound
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    port_training_step(model, optimizer, data.annotations.float(), data.captions, data.lengths)
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    assert largest == 5.0


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


def test_a_wider_beam_of_the_port_finds_a_caption_that_is_at_least_as_probable():
    model = port().eval()
    with torch.no_grad():
        model.output.weight.mul_(30)  # opinions strong enough for beams to differ

    def log_prob(ids: list[int], annotations: torch.Tensor) -> float:
        h, c = model.start(annotations)
        total, word = 0.0, START
        for following in [*ids, END]:
            logits, h, c, _ = model.step(model.embedding(torch.tensor([word])), annotations, h, c)
            log_probs = logits.log_softmax(1)
            log_probs[:, END] = 0.0 if following == END else float("-inf")
            total, word = total + float(log_probs[0, following]), following
        return total

    wider = 0
    for image in Data.make(SIZES._replace(images=12, lengths=(3,) * 12), CPU).annotations.float().unsqueeze(1):
        (one, _), (nine, _) = (port_beam_search(model, image, beam_size=K, ends_after=3) for K in (1, 9))
        assert len(one) == len(nine) == 3
        with torch.no_grad():
            assert log_prob(nine, image) >= log_prob(one, image) - 1e-4
        wider += nine != one
    assert wider


# What is compared


@pytest.mark.parametrize("beam_size", [1, 3])
def test_our_captions_have_the_lengths_they_are_to_have(beam_size):
    data = Data.make(SIZES._replace(images=5, lengths=(4, 2, 8, 3, 8)), CPU)
    captioner = our_module(SIZES, CPU).eval().captioner
    found = decode(captioner, data.annotations, data.lengths - 1, beam_size=beam_size)
    assert [[len(h.ids) for h in image] for image in found] == [[n - 1] * beam_size for n in (4, 2, 8, 3, 8)]
    assert all(h.finished for image in found for h in image)


def test_natural_lengths_are_flickr8ks_in_the_mean():
    lengths = natural_lengths(64)
    assert len(lengths) == 64
    assert sum(lengths) / 64 == pytest.approx(11.8, abs=0.3)
    assert min(lengths) == 6 and max(lengths) == 21


def test_batches_hold_captions_of_the_lengths_asked_for():
    data = Data.make(SIZES, CPU)
    for caption, length in zip(data.captions.tolist(), SIZES.lengths, strict=True):
        assert caption[0] == START and caption[length] == END and not any(caption[length + 1 :])
        assert all(word > 3 for word in caption[1:length])


# The limit


def test_flops_are_those_that_torch_counts():
    """Of equal lengths, because steps that do not exist are not counted but computed."""
    sizes = SIZES._replace(lengths=(4, 4, 4))
    torch.manual_seed(0)
    decoder = AttentionDecoder(
        SoftAttention(AdditiveScore(sizes.attention_dim, fused=False)),
        embedding_dim=sizes.embedding_dim,
        hidden_dim=sizes.hidden_dim,
    )
    decoder.build(sizes.vocabulary, sizes.annotation_dim)
    data = Data.make(sizes, CPU)
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            output = decoder(data.captions, data.lengths, decoder.encode(data.annotations))
            if backward:
                loss = reductions.caption_nll(output.logits, output.targets)
                (loss + reductions.doubly_stochastic_penalty(output.trace.alphas)).backward()
        assert counter.get_total_flops() == decoder_flops(sizes, backward=backward)


def test_flops_of_a_product_are_two_per_factor_pair_and_once_more_per_gradient():
    output = next(product for product in decoder_products(SIZES) if product.name == "output")
    assert output.flops(backward=False) == 2 * (4 + 2 + 3) * 7 * 23
    assert output.flops(backward=True) == 3 * output.flops(backward=False)
    soft, hard = (decoder_flops(SIZES, backward=True, hard=hard) for hard in (False, True))
    assert soft - hard == 2 * 2 * 9 * SIZES.locations * SIZES.annotation_dim


def test_parameters_are_those_of_the_decoder_without_embedding_and_biases():
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(5)), embedding_dim=7, hidden_dim=8)
    decoder.build(23, 6)
    matrices = sum(p.numel() for p in decoder.parameters() if p.dim() > 1)
    assert parameters(SIZES) == matrices - decoder.embedding.weight.numel()


def test_a_limit_is_products_and_traffic_one_after_the_other():
    machine = Machine({torch.float32: 100.0, torch.bfloat16: 400.0}, bandwidth=10.0)
    assert machine.seconds(Work(200, 50, 30), torch.float32) == 5.5
    assert machine.seconds(Work(200, 50, 30), torch.bfloat16) == 4.0
    assert training_bytes(SIZES, torch.bfloat16) < training_bytes(SIZES, torch.float32)


# Measuring and reporting


def test_subjects_take_turns_in_both_directions():
    called: list[str] = []
    timings = interleave(
        {"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3, device=CPU, warm_up=1
    )
    assert "".join(called) == "ab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_ratios_compare_within_a_round():
    ours, port = Timing((1.0, 10.0, 2.0)), Timing((3.0, 30.0, 6.0))
    assert ours.ratio(port) == 3.0
    assert ours.median == 2.0 and ours.quartiles == (1.5, 6.0)
    assert Timing((4.0,)).quartiles == (4.0, 4.0)


def test_a_report_holds_every_ratio_by_name():
    rows = [
        Row("step", "sizes", Timing((2.0,)), Timing((6.0,)), 1.0, soft=Timing((1.6,)), images=8),
        Row("help", "", Timing((0.5,)), import_torch=Timing((0.25,))),
    ]
    report = Report(rows, peak_memory={"step": 10, "step_common_port": 40}, shares={"waiting": 0.01})
    found = report.to_dict()
    assert found["vs_common_port"] == {"step": 3.0, "memory_step": 4.0}
    assert found["vs_limit"] == {"step": 2.0}
    assert found["vs_soft"] == {"step": 1.25}
    assert found["vs_import_torch"] == {"help": 2.0}
    assert found["seconds"] == {"step": 2.0, "step_common_port": 6.0, "step_limit": 1.0, "help": 0.5}
    assert found["images_per_second"] == {"step": 4.0}
    assert len(list(report.tables())) == 2


def test_the_benchmark_writes_what_it_promises(tmp_path, capsys):
    file = tmp_path / "benchmark.json"
    parts = ["train", "decode", "alone", "output", "encode", "load"]
    script.main(["--quick", "--rounds", "1", "--only", *parts, "--json", str(file)])
    found = json.loads(file.read_text())
    steps = {f"train_step_{size}_{kind}" for size in ("512", "2048") for kind in ("fp32", "bf16", "best")}
    searches = {f"{strategy}_{size}" for size in ("512", "2048") for strategy in ("greedy", "beam3", "beam5")}
    searches |= {f"{name}_one_at_a_time" for name in searches}
    assert steps | searches <= set(found["vs_common_port"])
    sizes = [f"V23{grouped}_{precision}" for grouped in ("", "_grouped") for precision in ("fp32", "bf16")]
    mixtures = {f"train_step_{kind}_{size}" for kind in KINDS for size in sizes}
    assert mixtures | {f"beam5_{kind}_V23" for kind in KINDS} == set(found["vs_soft"])
    hard = {f"train_step_{size}_hard_{kind}" for size in ("512", "2048") for kind in ("fp32", "bf16", "best")}
    assert steps | hard | searches | {"encode_conv", "load_features"} <= set(found["vs_limit"])
    assert all(ratio > 0 for part in ("vs_common_port", "vs_limit", "seconds") for ratio in found[part].values())
    assert set(found["shares"]) == {"waiting_for_cached_features_fp32", "waiting_for_cached_features_bf16"}
    assert {"command", "commit", "machine", "software", "date"} <= set(found["provenance"])
    assert found["settings"]["rounds"] == 1
    assert "beam5_2048" in capsys.readouterr().out


def test_the_simulated_epoch_says_what_it_promises(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = epoch.measure(CPU, quick=True, rounds=2, folder=tmp_path)
    rows = {row.name.removeprefix("epoch_"): row for row in report.rows}
    assert tuple(rows) == epoch.CONFIGS
    soft = rows["coco_vgg19_soft"]
    tokens = int(re.search(r"([\d,]+) tokens", soft.what)[1].replace(",", ""))
    assert soft.limit is not None and all(row.limit is None for row in report.rows[1:])
    for config, row in rows.items():
        assert row.images == 1000 and "200 images in links to 8 files" in row.what
        assert report.rates[f"epoch_{config}_tokens"] == pytest.approx(tokens / row.ours.median)
        for gpu in epoch.GPUS:
            ratio = report.scaled[f"epoch_{config}_{gpu}"] / report.scaled[f"epoch_coco_vgg19_soft_{gpu}_limit"]
            times = row.ours.median / soft.limit
            assert times / 4 < ratio < times * 4  # the median of the rounds' ratios, not the ratio of medians
    assert 0 <= report.shares["epoch_waiting_for_features"] <= 1
    assert [len(sizes) for sizes in report.memory_over_time.values()] == [3, 3]
    assert len(list((tmp_path / "epoch/train").glob("*.npy"))) == 13
    assert len({path.stat().st_ino for path in (tmp_path / "epoch/train").glob("*.npy")}) == 9
    assert list(report.tables())


def test_a_steps_work_is_that_of_its_batch():
    data = Data.make(SIZES, CPU)
    decoder = {"attention_dim": 5, "embedding_dim": 7, "hidden_dim": 8}
    scale = epoch.Scale(3, 3, 9, 6, 3, 1, decoder)
    batch = data.batch()
    assert epoch.work_of(len(batch.rows), batch.lengths, scale, 23) == Work.of_training(SIZES, torch.bfloat16)


def test_the_limit_counts_tanh_once_forward_and_once_backward():
    elements = sum(SIZES.lengths) * SIZES.locations * SIZES.attention_dim
    training, search = Work.of_training(SIZES, torch.float32), Work.of_search(SIZES, 1, torch.float32)
    assert training.elementwise == 2 * 9 * elements  # instructions that could have been multiplications with additions
    assert search.elementwise == 2 * 4 * elements
    rows = sum(1 + 5 * (length - 1) for length in SIZES.lengths)
    assert Work.of_search(SIZES, 5, torch.float32).elementwise * sum(SIZES.lengths) == search.elementwise * rows


def test_captions_of_an_image_lie_side_by_side():
    batch = Data.make(SIZES._replace(images=2, lengths=(2, 3, 2, 4)), CPU).batch()
    assert batch.image_index.tolist() == [0, 0, 1, 1] and batch.image_ids.tolist() == [0, 1]


@pytest.mark.slow
def test_generated_captions_have_cocos_vocabulary(tmp_path):
    path = coco.write_captions(tmp_path / "annotations/captions_train2017.json")
    captions = CocoSource(str(tmp_path)).index("train").captions
    words = len(Vocabulary.build((caption.split() for caption in captions), min_count=5))
    assert words == pytest.approx(9490, rel=0.03), path


def test_rows_and_kernels_are_compared_with_one_row_and_with_an_earlier_version(tmp_path):
    file, here = tmp_path / "benchmark.json", str(Path(script.__file__).parent.parent)
    script.main(["--quick", "--rounds", "2", "--only", "rows", "score", "--earlier", here, "--json", str(file)])
    found = json.loads(file.read_text())
    kinds = [f"{kind}_{rows}" for kind in ("soft", "hard") for rows in ("one_row", "two_rows", "two_captions")]
    steps = {f"train_step_{kind}_{precision}" for kind in kinds for precision in ("fp32", "bf16")}
    assert set(found["vs_one_row"]) == steps
    assert found["vs_one_row"]["train_step_hard_one_row_fp32"] == 1
    assert {"additive_backward_projected_two_rows_bf16", "train_step_512_bf16"} < set(found["vs_earlier"])


@pytest.mark.parametrize("earlier", [[], ["--earlier", "nowhere"]])
def test_kernels_are_compared_with_a_version_that_is_there(earlier, capsys):
    with pytest.raises(SystemExit) as left:
        script.main(["--quick", "--only", "score", *earlier])
    assert left.value.code == 2 and "earlier version" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as left:
        script.main(["--quick", "--only", "encode", "--device", "cuda"])
    assert left.value.code == 2


def test_rounds_must_be_positive():
    with pytest.raises(SystemExit):
        script.main(["--rounds", "0"])


@pytest.mark.parametrize("who", ["common_port", "fp32"])
def test_a_step_takes_memory(who):
    assert peak_of_a_step(who, "512", CPU, quick=True) >= 0


@pytest.mark.slow
def test_what_several_processes_compute_is_compared_with_what_one_does(tmp_path):
    file = tmp_path / "benchmark.json"
    script.main(["--quick", "--only", "processes", "--json", str(file)])
    shares = json.loads(file.read_text())["shares"]
    gradients = {
        f"gradient_{name}_{count}_processes"
        for name in ("soft", "soft_standardized", "marginal", "transformer")
        for count in (2, 3)
    }
    others = {f"{name}_{count}_processes" for name in ("scores", "correlation_of_random_numbers") for count in (2, 3)}
    assert set(shares) == gradients | others
    assert shares["scores_2_processes"] == shares["scores_3_processes"] == 0
    assert 0 < max(shares[f"correlation_of_random_numbers_{count}_processes"] for count in (2, 3)) < 0.01
    assert 0 < max(shares[name] for name in gradients) < 1e-5  # float32 adds in another order


@pytest.mark.slow
def test_the_parts_that_start_processes_run(tmp_path):
    file = tmp_path / "benchmark.json"
    script.main(
        [
            "--quick",
            "--rounds",
            "1",
            "--only",
            "memory",
            "index",
            "startup",
            "caption",
            "epoch",
            "evaluate",
            "--json",
            str(file),
        ]
    )
    found = json.loads(file.read_text())
    assert {"train_step_512_fp32", "train_step_512_fp32_common_port"} <= set(found["peak_memory"])
    assert "memory_train_step_512_fp32" in found["vs_common_port"] or found["peak_memory"]["train_step_512_fp32"] == 0
    assert {f"epoch_{config}_tokens" for config in epoch.CONFIGS} == set(found["rates"])
    assert min(found["rates"].values()) > 0
    assert found["vs_import_torch"]["startup_caption_conv"] > 0
    assert {"startup_help", "startup_caption_conv", "caption_conv", "epoch_coco_vgg19_soft"} <= set(found["seconds"])
    assert found["seconds"]["startup_help"] < 2
    assert found["images_per_second"]["evaluate_captions"] > 1


def test_the_profile_names_the_kernels_where_they_are_used(tmp_path):
    from benchmarks import profile
    from captioning.kernels import native

    profile.main([str(tmp_path / "profile.json"), "--quick"])
    profiles = json.loads((tmp_path / "profile.json").read_text())["profiles"]
    assert set(profiles) == {"kernels_fp32", "kernels_bf16", "plain_fp32", "plain_bf16"}
    assert not any("Additive" in name for name in profiles["plain_fp32"]["operations"])
    if native.usable(torch.zeros(1)):
        assert any("Additive" in name for name in profiles["kernels_fp32"]["operations"])
