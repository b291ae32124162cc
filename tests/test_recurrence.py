"""A recurrence over captions of different lengths equals the one that runs every step of every caption."""

import functools

import pytest
import torch

from captioning.attention import (
    AdditiveScore,
    CoverageScore,
    GeneralScore,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    ScaledDotScore,
    SoftAttention,
)
from captioning.data.batch import pad_captions
from captioning.kernels import recurrence
from captioning.model import AttentionDecoder, SummedOutput

B, L, D, E, H, V = 3, 5, 6, 4, 8, 17
WORDS = {1: [2, 5, 1], 2: [1, 2, 6, 1, 1, 1]}  # of each caption, by the captions of an image
DECODERS = {
    "additive": lambda: make_decoder(SoftAttention(AdditiveScore(16))),
    "additive, no whole vectors": lambda: make_decoder(SoftAttention(AdditiveScore(7))),
    "general": lambda: make_decoder(SoftAttention(GeneralScore())),
    "a state of its own": lambda: make_decoder(SoftAttention(CoverageScore(16))),
    "two heads": lambda: make_decoder(MultiHeadAttention(ScaledDotScore(), heads=2)),
    "most probable location": lambda: make_decoder(HardAttention(AdditiveScore(16))),
    "summed over locations": lambda: make_decoder(SoftAttention(AdditiveScore(16)), SummedOutput()),
}


def make_decoder(attention, output=None) -> AttentionDecoder:
    torch.manual_seed(0)
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, dropout=0.0, output=output)
    decoder.build(V, D, (1, L))
    attention.progress = 0.0
    return decoder


def forced(decoder: AttentionDecoder, words: list[int], masked: bool) -> dict[str, torch.Tensor]:
    """Return the output of teacher forcing, and the gradients of annotations and parameters."""
    generator = torch.Generator().manual_seed(1)
    annotations = torch.randn(B, L, D, generator=generator, requires_grad=True)
    captions, lengths = pad_captions([[4 + (5 * n + i) % (V - 4) for i in range(n)] for n in words])
    mask = torch.arange(L) < torch.tensor([L, 2, 3]).unsqueeze(1) if masked else None
    output = decoder(captions, lengths, decoder.encode(annotations, mask))
    weights = torch.rand(output.logits.shape, generator=generator)
    loss = (output.logits * weights).sum() + (output.trace.alphas**3).sum() + output.trace.betas.sum()
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, [annotations, *parameters], allow_unused=True)
    outputs = {"logits": output.logits, "alphas": output.trace.alphas, "locations": output.trace.locations}
    return outputs | {name: x for name, x in zip(["annotations", *names], gradients, strict=True) if x is not None}


def rows_at_each_step(decoder: AttentionDecoder) -> list[int]:
    counts: list[int] = []
    decoder.attention.register_forward_pre_hook(lambda _, arguments: counts.append(len(arguments[0])))
    return counts


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("captions", WORDS)
@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS)
def test_images_that_have_ended_leave_and_change_no_output_and_no_gradient(make, captions, masked, monkeypatch):
    decoder = make()
    decoder.attention.context_mode = decoder.attention.context_modes[-2:][0]  # argmax where there is one
    decoder.eval()
    counts = rows_at_each_step(decoder)
    left = forced(decoder, WORDS[captions], masked)
    ends = [max(WORDS[captions][i : i + captions]) + 1 for i in range(0, B * captions, captions)]
    assert counts == [captions * sum(end > t for end in ends) for t in range(max(ends))]

    counts.clear()
    monkeypatch.setattr(recurrence, "LARGEST_REMAINDER", 0.0)
    whole = forced(decoder, WORDS[captions], masked)
    assert set(counts) == {B * captions} and left.keys() == whole.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, whole[name], atol=2e-6, rtol=1e-4, msg=name)


def test_a_batch_of_nearly_one_length_keeps_its_images_in_place():
    decoder = make_decoder(SoftAttention(AdditiveScore(16)))
    counts = rows_at_each_step(decoder)
    forced(decoder, [5, 5, 4], masked=False)
    assert set(counts) == {B}


def test_only_images_whose_contexts_are_drawn_draw_while_they_remain():
    """The recurrence sorts images; whether an image draws must move with it."""
    decoder = make_decoder(HardAttention(AdditiveScore(16), sample_probability=0.5))
    decoder.train()
    captions, lengths = pad_captions([[4] * n for n in WORDS[1]])
    for seed in range(8):
        torch.manual_seed(seed)
        memory = decoder.encode(torch.randn(B, L, D))
        output = decoder(captions, lengths, memory)
        drawn = (output.trace.locations >= 0) & output.mask
        assert torch.equal(drawn, output.mask & memory.drawn.unsqueeze(1))
        assert not output.location_log_prob[~drawn].any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [SoftAttention, HardAttention, GumbelAttention])
def test_no_step_and_no_gradient_waits_for_the_gpu(attention, precision, monkeypatch):
    decoder = make_decoder(attention(AdditiveScore(16))).cuda().train()
    annotations = torch.randn(B, L, D, device="cuda")

    def unwaited(function, *arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for words in ([4, 2, 3], [5, 2, 3]):  # the first compiles kernels and sets libraries up
        captions, lengths = pad_captions([[4] * n for n in words])
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            output = decoder(captions.cuda(), lengths.cuda(), decoder.encode(annotations))
            loss = output.logits.pow(2).mean() + output.trace.alphas.pow(3).sum() + output.trace.betas.sum()
        loss.backward() if words[0] == 4 else unwaited(loss.backward)
        steps = functools.partial(unwaited, recurrence.run_recurrence)
        monkeypatch.setattr("captioning.model.lstm.run_recurrence", steps)
