"""A compiled recurrence against the eager one, how often it is compiled, and that no step waits for a GPU."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path

import pytest
import torch

from captioning.attention import AdditiveScore, Entmax15, GumbelAttention, HardAttention, SoftAttention, Softmax
from captioning.attention.base import Attention
from captioning.data.batch import pad_captions
from captioning.encoders import ConvEncoder
from captioning.kernels import compilation, recurrence
from captioning.kernels.compilation import ShapeBuckets
from captioning.model import AttentionDecoder, DecoderOutput, Output, SummedOutput
from captioning.training.module import CaptioningModule
from captioning.vocabulary import Vocabulary

B, L, D, A, E, H, V = 3, 9, 7, 6, 8, 10, 13

# The compiler silences this one by hand, which warnings that are errors do not notice.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def backend(monkeypatch, tmp_path) -> None:
    """Trace and differentiate as torch.compile does, but run PyTorch's operations instead of compiling their code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    fresh(monkeypatch, tmp_path)


def fresh(monkeypatch, cache: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compilation.compiled.cache_clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))


def graphs() -> int:
    """Return the number of compiled graphs."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def make_decoder(attention: Attention | None = None, output: Output | None = None) -> AttentionDecoder:
    decoder = AttentionDecoder(
        attention or SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H, dropout=0.0, output=output
    )
    decoder.build(V, D)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return decoder.train()


def teach(
    decoder: AttentionDecoder, words: list[int], annotations: torch.Tensor, mask: torch.Tensor | None = None
) -> DecoderOutput:
    captions, lengths = pad_captions([[4 + (7 * n + i) % (V - 4) for i in range(n)] for n in words])
    device = annotations.device
    return decoder(captions.to(device), lengths.to(device), decoder.encode(annotations, mask))


def loss(output: DecoderOutput) -> torch.Tensor:
    return output.logits.pow(2).mean() + output.trace.alphas.pow(3).sum() + output.trace.betas.sum()


def assert_same(compiled: AttentionDecoder, eager: AttentionDecoder, *batch, **tolerance) -> None:
    """One training step of both gives the same output and the same gradients."""
    outputs = [teach(decoder, *batch) for decoder in (compiled, eager)]
    for one, other in zip(*(vars(output).values() for output in outputs), strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    for decoder, output in zip((compiled, eager), outputs, strict=True):
        decoder.zero_grad()
        loss(output).backward()
    for (name, one), other in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name, **tolerance)


@pytest.mark.parametrize(("output", "normaliser"), [(None, Softmax), (SummedOutput, Softmax), (None, Entmax15)])
def test_a_compiled_recurrence_gives_the_same_numbers_and_compiles_once_for_captions_of_any_length(
    output, normaliser, backend
):
    eager = make_decoder(SoftAttention(AdditiveScore(A), normaliser=normaliser()), output and output())
    decoder = copy.deepcopy(eager)
    decoder.compile_training("default")
    for words in ([4, 2, 3], [6, 6, 5], [1, 2, 1]):
        assert_same(decoder, eager, words, torch.randn(B, L, D))
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_short_batch_is_padded_instead_of_compiled_for(backend):
    eager = make_decoder()
    decoder = copy.deepcopy(eager)
    decoder.compile_training("default")
    mask = torch.rand(B, L) > 0.4
    mask[:, 0] = True
    annotations = torch.randn(B, L, D)
    assert_same(decoder, eager, [4, 2, 3, 3, 1, 2], annotations, mask)  # two captions of every image
    assert_same(decoder, eager, [4, 2], annotations[:1], mask[:1])
    assert graphs() == 1


@pytest.mark.parametrize("attention", [HardAttention, GumbelAttention])
def test_stochastic_attention_is_compiled_once_for_any_schedule(attention, backend):
    decoder = make_decoder(attention(AdditiveScore(A)))
    decoder.compile_training("default")
    for words in ([4, 2, 3], [3, 3, 5], [2, 1]):
        output = teach(decoder, words, torch.randn(len(words), L, D))
        (output.logits.sum() + output.log_prob.sum()).backward()
    assert output.log_prob.shape == (2, 3)
    assert (output.log_prob <= 0).all() and decoder.embedding.weight.grad.isfinite().all()
    assert graphs() == 1


@pytest.mark.parametrize("attention", [HardAttention, GumbelAttention])
def test_compiled_stochastic_attention_equals_eager_through_a_ramp_to_the_end(attention, backend):
    """None, some and then all images drawn; the same random numbers for both."""
    eager = make_decoder(attention(AdditiveScore(A), sample_probability=1.0, ramp=(1, 3)))
    decoder = copy.deepcopy(eager)
    decoder.compile_training("default")
    for step in range(5):
        annotations = torch.randn(B, L, D)
        outputs = []
        for either in (decoder, eager):
            torch.manual_seed(step)
            either.attention.begin_batch()
            outputs.append(teach(either, [3, 3, 3], annotations))
        for one, other in zip(*(vars(output).values() for output in outputs), strict=True):
            torch.testing.assert_close(one, other)
        drawn = outputs[0].log_prob.ne(0).any(dim=1)
        assert not drawn.any() if step < 2 else step == 2 or drawn.all()
        for output in outputs:
            (loss(output) + output.log_prob.sum()).backward()
    for one, other in zip(decoder.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert graphs() == 2  # where nothing is left to decide there is no mixture


def test_varying_batch_sizes_cause_few_compilations():
    buckets = ShapeBuckets()
    assert buckets.images(64, 1) == 64
    assert [buckets.images(count, 1) for count in (3, 64, 65, 70, 72)] == [64, 64, 72, 72, 72]
    assert buckets.images(3, 5) == 3  # images with five rows each are another shape
    assert len({buckets.images(count, 1) for count in range(1, 1000)}) < 30


def test_only_training_is_compiled(monkeypatch):
    monkeypatch.setattr(recurrence, "compiled", lambda *arguments: pytest.fail("compiled"))
    decoder = make_decoder()
    decoder.compile_training("default")
    annotations = torch.randn(1, L, D)
    with torch.no_grad():
        teach(decoder, [2], annotations)
    decoder.eval()
    teach(decoder, [2], annotations)
    decoder.step(torch.tensor([1]), decoder.init_state(memory := decoder.encode(annotations)), memory)
    decoder.train()
    with pytest.raises(pytest.fail.Exception):
        teach(decoder, [2], annotations)


def test_a_model_trained_compiled_is_saved_as_any_other():
    plain, compiled = (
        CaptioningModule(
            ConvEncoder((4,), (2,), image_size=16),
            AttentionDecoder(SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H),
            compile=mode,
        )
        for mode in (None, "default")
    )
    plain.assemble(Vocabulary(["a", "b"]))
    compiled.assemble(Vocabulary(["a", "b"]))
    assert compiled.captioner.decoder._recurrence.mode == "default"
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert compiled.captioner.decoder.to_config() == plain.captioner.decoder.to_config()
    plain.load_state_dict(compiled.state_dict())


@pytest.mark.parametrize("chosen", [None, "mine"])
def test_compiled_code_is_kept_in_the_users_cache_or_a_chosen_folder(chosen, monkeypatch, tmp_path):
    fresh(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    else:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / chosen))
    compilation.compiled(lambda x: x, "default")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / (chosen or "captioning/inductor"))


@pytest.mark.slow
def test_generated_code_gives_the_same_numbers(monkeypatch, tmp_path):
    fresh(monkeypatch, tmp_path)
    eager = make_decoder()
    decoder = copy.deepcopy(eager)
    decoder.compile_training("default")
    for words in ([4, 2, 3], [6, 5]):
        assert_same(decoder, eager, words, torch.randn(len(words), L, D), atol=1e-5, rtol=1e-4)
    assert graphs() == 1
    assert any(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_gpu_gives_the_same_numbers_compiled_and_in_graphs(mode, monkeypatch, tmp_path):
    fresh(monkeypatch, tmp_path)
    eager = make_decoder().cuda()
    decoder = copy.deepcopy(eager)
    decoder.compile_training(mode)
    for words in ([4, 2, 3], [6, 5, 6], [2, 2, 2], [4, 3], [4, 2, 3]) * 2:  # recorded, then replayed
        annotations = torch.randn(len(words), L, D, device="cuda")
        assert_same(decoder, eager, words, annotations, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [SoftAttention, HardAttention, GumbelAttention])
def test_no_step_and_no_gradient_makes_the_host_wait_for_the_gpu(attention, precision, monkeypatch):
    decoder = make_decoder(attention(AdditiveScore(A))).cuda()
    annotations = torch.randn(B, L, D, device="cuda")

    def train(words: list[int]) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            value = loss(teach(decoder, words, annotations))
        torch.cuda.set_sync_debug_mode(mode)
        try:
            value.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def watched(unroll):
        def run(*arguments):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                return unroll(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    monkeypatch.setattr(decoder, "_recurrence", watched(decoder._recurrence))
    mode = "default"
    train([4, 2, 3])  # compiles kernels, sets libraries up
    mode = "error"
    train([5, 2, 3])
