"""The benchmark compares like with like: the port learns and searches as it should, and the work is counted exactly."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import agreement, epoch, loading, training
from benchmarks.common_port import CommonPort, port_beam_search, port_loss, port_training_step
from benchmarks.decoding import decode
from benchmarks.models import Data, natural_lengths, our_module
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, Timing, interleave
from benchmarks.work import (
    Machine,
    Sizes,
    Work,
    decoder_flops,
    decoder_products,
    decoding_bytes,
    parameters,
    training_bytes,
)
from captioning.attention import AdditiveScore, SoftAttention
from captioning.cli import bench
from captioning.data import CocoSource
from captioning.errors import InputError
from captioning.kernels.additive import plain_additive_logits
from captioning.kernels.machine import has_bfloat16_products
from captioning.model import AttentionDecoder
from captioning.objective import reductions
from captioning.vocabulary import END, START, Vocabulary

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
    captions = decode(captioner, data.annotations, data.lengths - 1, beam_size=beam_size)
    assert [[len(h.ids) for h in image] for image in captions] == [[n - 1] * beam_size for n in (4, 2, 8, 3, 8)]
    assert all(h.finished for image in captions for h in image)


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


def test_flops_are_those_that_torch_counts(monkeypatch):
    """Of equal lengths, because a batch may compute steps that do not exist; without kernels of our own."""
    monkeypatch.setattr("captioning.kernels.linear.FEW", ())
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


def test_a_search_reads_the_weights_of_its_steps_at_every_word_and_the_others_once():
    sizes = SIZES._replace(lengths=(3, 2))
    longer = sizes._replace(lengths=(4, 2))
    projection, initial_state = sizes.annotation_dim * sizes.attention_dim, 2 * sizes.annotation_dim * sizes.hidden_dim
    step = parameters(sizes) - projection - initial_state
    assert decoding_bytes(longer, torch.float32) - decoding_bytes(sizes, torch.float32) == 4 * step


def test_the_limit_counts_tanh_once_forward_and_once_backward():
    elements = sum(SIZES.lengths) * SIZES.locations * SIZES.attention_dim
    training, search = Work.of_training(SIZES, torch.float32), Work.of_search(SIZES, 1, torch.float32)
    assert training.elementwise == 2 * 9 * elements  # instructions in place of multiplications with additions
    assert search.elementwise == 2 * 4 * elements
    rows = sum(1 + 5 * (length - 1) for length in SIZES.lengths)
    assert Work.of_search(SIZES, 5, torch.float32).elementwise * sum(SIZES.lengths) == search.elementwise * rows


# Measuring and reporting


def test_subjects_take_turns_in_both_directions(tmp_path):
    called: list[str] = []
    subjects = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    timings = interleave(subjects, Setup(CPU, True, 3, tmp_path), warm_up=1)
    assert "".join(called) == "ab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_ratios_compare_within_a_round():
    ours, port = Timing((1.0, 10.0, 2.0)), Timing((3.0, 30.0, 6.0))
    assert ours.speedup_over(port) == 3.0
    assert ours.median == 2.0 and ours.quartiles == (1.5, 6.0)
    assert Timing((4.0,)).quartiles == (4.0, 4.0)


def test_a_report_holds_every_ratio_by_name():
    rows = [
        Row("step", "sizes", Timing((2.0,)), Timing((6.0,)), 1.0, items=8),
        Row("epoch", "", Timing((0.5,)), items=30, unit="tokens"),
    ]
    report = Report(rows, fractions={"waiting": 0.01})
    rows.append(Row("kernel", "", Timing((2.0,)), Timing((8.0,)), other_name="plain_formula"))
    content = report.to_dict()
    assert content["vs_plain_formula"] == {"kernel": 4.0}
    assert content["vs_common_port"] == {"step": 3.0}
    assert content["vs_limit"] == {"step": 2.0}
    assert content["seconds"] == {"step": 2.0, "step_common_port": 6.0, "step_limit": 1.0, "epoch": 0.5} | {
        "kernel": 2.0,
        "kernel_plain_formula": 8.0,
    }
    assert content["per_second"] == {"step": {"images": 4.0}, "epoch": {"tokens": 60.0}}
    assert len(list(report.tables())) == 2


def test_the_benchmark_writes_every_subject(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "benchmark.json"
    bench.main(["--quick", "--rounds", "1", "--only", *bench.SUBJECTS, "--json", str(file)])
    content = json.loads(file.read_text())
    sizes = ("512", "2048")
    steps = {f"train_step_{size}_{kind}" for size in (*sizes, "512_mixed", "1280_mixed") for kind in ("fp32", "bf16")}
    searches = {f"{strategy}_{size}" for size in sizes for strategy in ("greedy", "beam3", "beam5")}
    searches |= {f"{name}_one_at_a_time" for name in searches}
    kinds = ("fp32", "bf16") if has_bfloat16_products() else ()
    hard = {f"train_step_{size}_hard_{kind}" for size in sizes for kind in kinds}
    models = {f"train_step_512_{model}_{kind}" for model in training.MODELS if model != "soft" for kind in kinds}
    formulas = {f"kernel_{name}_{kind}" for name in KERNELS for kind in ("fp32", "bf16")}
    assert set(content["vs_common_port"]) == steps | searches
    assert set(content["vs_soft_attention"] if kinds else ()) == hard | models
    assert set(content["vs_plain_formula"]) == formulas
    emulated = set() if has_bfloat16_products() else {name for name in steps if name.endswith("_bf16")}
    assert set(content["vs_limit"]) == (steps - emulated) | searches | hard | {"load_features"}
    assert {f"epoch_{config}" for config in epoch.CONFIGS} < set(content["seconds"])
    assert all(ratio > 0 for key in ("vs_common_port", "vs_limit", "seconds") for ratio in content[key].values())
    waiting = {f"waiting_for_cached_features_{precision}" for precision in ("fp32", "bf16")}
    assert set(content["fractions"]) == waiting | {"epoch_waiting_for_features", "extraction_of_network_1_thread"}
    assert {"command", "commit", "machine", "software", "date"} <= set(content["provenance"])
    assert content["settings"]["rounds"] == 1
    assert "beam5_2048" in capsys.readouterr().out


def test_most_features_of_the_simulated_epoch_are_links(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index, data = epoch.training_split(epoch.Scale(200, 1000, 4, 6, 8, 2), Setup(CPU, True, 1, tmp_path))
    assert (len(index), len(index.captions)) == (200, 1000)
    files = list((tmp_path / "epoch/train").glob("*.npy"))
    assert len(files) == 13 and len({path.stat().st_ino for path in files}) == 9
    batch = next(loading.endless(data, CPU))
    assert batch.annotations is not None and batch.annotations.shape[1:] == (4, 6)


def test_captions_of_an_image_lie_side_by_side():
    batch = Data.make(SIZES._replace(images=2, lengths=(2, 3, 2, 4)), CPU).batch()
    assert batch.image_index.tolist() == [0, 0, 1, 1] and batch.image_ids.tolist() == [0, 1]


@pytest.mark.slow
def test_generated_captions_have_cocos_vocabulary(tmp_path):
    path = epoch.write_captions(tmp_path / "annotations/captions_train2017.json")
    captions = CocoSource(str(tmp_path)).index("train").captions
    words = len(Vocabulary.build((caption.split() for caption in captions), min_count=5))
    assert words == pytest.approx(9490, rel=0.03), path


def test_a_kernel_that_disagrees_with_its_formula_ends_the_benchmark_with_a_sentence(monkeypatch):
    agreement.check(CPU)
    monkeypatch.setattr(agreement, "additive_logits", lambda *inputs: 1.01 * plain_additive_logits(*inputs))
    with pytest.raises(InputError, match="the kernel of the additive score differs from its plain formula by"):
        agreement.check(CPU)


def test_a_missing_device_is_named(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as left:
        bench.main(["--quick", "--only", "train", "--device", "cuda"])
    assert left.value.code == 2 and "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("rounds", ["0", "1" + 30 * "0"])
def test_rounds_are_of_a_number_that_ends(rounds, capsys):
    with pytest.raises(SystemExit) as left:
        bench.main(["--rounds", rounds])
    assert left.value.code == 2 and "argument --rounds: must be a whole number in 1 .. 1000" in capsys.readouterr().err
