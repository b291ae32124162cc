"""Tied and pretrained embeddings, and dropout on the recurrence and of the annotations' channels."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from torch import Tensor, nn

from captioning.attention import AdditiveScore, CoverageScore, MultiHeadAttention, ScaledDotScore, SoftAttention
from captioning.attention.base import Memory
from captioning.data.batch import pad_captions
from captioning.data.shapes import ShapesSource
from captioning.data.word_vectors import read_word_vectors
from captioning.decoder import AttentionDecoder, Decoder, TransformerDecoder
from captioning.errors import InputError
from captioning.kernels.dropout import Dropout
from captioning.output import MarginalOutput, Output
from captioning.training import CaptioningModule

B, L, D, E, H, V = 3, 9, 7, 5, 10, 13
CAPTIONS = [[4, 5], [6], [7, 8, 9]]


def make_decoder(output: Output | None = None, **options) -> AttentionDecoder:
    torch.manual_seed(2)
    attention = SoftAttention(CoverageScore(6))
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, **{"output": output, "dropout": 0.0} | options)
    decoder.build(V, D)
    return decoder


def teacher_forced(decoder: AttentionDecoder, annotations: Tensor, captions=CAPTIONS):
    return decoder(*pad_captions(captions), decoder.encode(annotations))


# Recurrent dropout


class Mask(nn.Module):
    """In the place of the dropout that draws one."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.p, self.mask = 0.5, mask

    def forward(self, ones: Tensor) -> Tensor:
        assert torch.equal(ones, torch.ones_like(self.mask))
        return self.mask


def test_one_mask_for_all_steps_of_a_caption_is_a_thinned_recurrent_matrix():
    """W (m * h) = (W diag m) h: every caption is that of a decoder of its own, without dropout."""
    decoder, annotations = make_decoder(recurrent_dropout=0.5).train(), torch.randn(B, L, D)
    mask = 2.0 * (torch.rand(B, H) > 0.5)
    decoder.recurrent_dropout = Mask(mask)
    output = teacher_forced(decoder, annotations)
    rows = output.mask.nonzero()[:, 0]
    for n, caption in enumerate(CAPTIONS):
        thinned = copy.deepcopy(decoder).eval()
        with torch.no_grad():
            thinned.hidden_to_gates.weight *= mask[n]
        alone = teacher_forced(thinned, annotations[n : n + 1], [caption])
        torch.testing.assert_close(output.logits[rows == n], alone.logits)
        torch.testing.assert_close(output.trace.alphas[n, : len(caption) + 1], alone.trace.alphas[0])
    whole = teacher_forced(copy.deepcopy(decoder).eval(), annotations)
    assert not torch.allclose(whole.logits, output.logits, atol=1e-3)


def test_masks_are_of_training_alone_and_differ_between_captions():
    decoder, annotations = make_decoder(recurrent_dropout=0.5), torch.randn(1, L, D).expand(B, L, D)
    same = [[4, 5, 6]] * B
    of_steps = [part.unflatten(0, (B, -1)) for part in
                (teacher_forced(decoder.train(), annotations, same).logits,
                 teacher_forced(decoder.eval(), annotations, same).logits)]  # fmt: skip
    trained, evaluated = of_steps
    torch.testing.assert_close(evaluated[0], evaluated[1])
    assert all(not torch.allclose(trained[a], trained[b], atol=1e-4) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_without_it_no_random_number_is_drawn():
    decoder, annotations = make_decoder().train(), torch.randn(B, L, D)
    before = torch.get_rng_state()
    teacher_forced(decoder, annotations)
    assert torch.equal(torch.get_rng_state(), before)


def test_images_take_their_masks_along():
    """As when a compiled step is filled up with copies of the last image."""
    mask = torch.arange(6.0).unsqueeze(1).expand(6, H)
    memory = Memory(torch.randn(3, L, D), torch.randn(3, L, 2), kept_units=mask)
    assert memory.select(torch.tensor([2, 0])).kept_units[:, 0].tolist() == [4, 5, 0, 1]


# Channels of the annotations


def decoders_that_drop_channels() -> list[Decoder]:
    attention = MultiHeadAttention(ScaledDotScore(), heads=2)
    transformer = TransformerDecoder(attention, dim=8, layers=1, heads=2, dropout=0.0, annotation_dropout=0.5)
    transformer.build(V, D)
    return [make_decoder(annotation_dropout=0.5), transformer]


@pytest.mark.parametrize("number", [0, 1])
def test_a_channel_is_dropped_at_all_locations_of_an_image(number):
    decoder, annotations = decoders_that_drop_channels()[number].train(), torch.randn(B, L, D)
    mask = 2.0 * (torch.rand(B, 1, D) > 0.5)
    assert not torch.allclose(*(teacher_forced(decoder, annotations).logits for _ in range(2)), atol=1e-4)
    decoder.annotation_dropout = Mask(mask)
    dropped = teacher_forced(decoder, annotations).logits
    decoder.annotation_dropout = Dropout(0.0)
    torch.testing.assert_close(dropped, teacher_forced(decoder, annotations * mask).logits)
    decoder.annotation_dropout = Dropout(0.5)
    evaluated = teacher_forced(decoder.eval(), annotations).logits
    decoder.annotation_dropout = Dropout(0.0)
    assert torch.equal(evaluated, teacher_forced(decoder, annotations).logits)


def test_channels_are_dropped_after_they_were_standardised():
    decoder = make_decoder(annotation_dropout=0.5, standardize_annotations=True).train()
    decoder.annotation_dropout = Mask(torch.zeros(B, 1, D))
    memory = decoder.encode(5 + torch.randn(B, L, D))
    assert torch.equal(memory.annotations, torch.zeros(B, L, D))
    assert decoder.standardize.running_mean.abs().min() > 0.1  # the statistics are of what the encoder gave


def test_a_share_of_channels_is_a_probability():
    with pytest.raises(InputError, match="annotation_dropout must be"):
        make_decoder(annotation_dropout=1.0)


# Tied embeddings


@pytest.mark.parametrize("output", [None, MarginalOutput])
def test_tied_embeddings_are_one_matrix_that_both_ends_train(output):
    tied, free = (make_decoder(output and output(), tie_embeddings=tie).train() for tie in (True, False))
    count = {decoder: sum(p.numel() for p in decoder.parameters()) for decoder in (tied, free)}
    assert count[free] - count[tied] == V * E
    annotations = torch.randn(B, L, D)
    captions, lengths = pad_captions(CAPTIONS)
    with torch.no_grad():  # the same numbers, in two matrices
        free.load_state_dict(tied.state_dict())
    for decoder in (tied, free):
        logits = decoder(captions, lengths, decoder.encode(annotations)).logits
        logits.log_softmax(-1)[:, 4].sum().backward()
    torch.testing.assert_close(tied.embedding.weight.grad, free.embedding.weight.grad + free.output.weight.grad)


def test_tied_embeddings_are_still_one_after_loading():
    decoder = make_decoder(tie_embeddings=True)
    again = AttentionDecoder.from_config(decoder.to_config())
    again.build(V, D)
    again.load_state_dict(decoder.state_dict())
    assert again.output.weight is again.embedding.weight
    assert torch.equal(again.output.weight, decoder.embedding.weight)


# Pretrained embeddings

LINES = ["the 1 2 3", "red -0.5 1e-3 2", "the 9 9 9", ". . . 4 5 6", "circle 0 0 1"]
IDS = {"red": 7, "the": 4, "dog": 5}


@pytest.mark.parametrize("header", [[], ["5 3"]])
def test_vectors_of_known_words_are_read_with_or_without_a_header(tmp_path, header):
    path = tmp_path / "vectors.txt"
    path.write_text("\n".join([*header, *LINES]))
    ids, vectors = read_word_vectors(path, IDS, 3)
    found = dict(zip(ids.tolist(), vectors.tolist(), strict=True))
    assert found == {4: [1, 2, 3], 7: pytest.approx([-0.5, 1e-3, 2])}


@pytest.mark.parametrize(
    ("text", "dim", "message"),
    [
        ("the 1 2 3", 4, "vectors.txt, line 1: a vector of 3 numbers, the decoder's embedding_dim is 4"),
        ("the 1 2 3", 2, "vectors.txt, line 1: a vector of 3 numbers, the decoder's embedding_dim is 2"),
        ("the 1 2 3\nred 1 x 3", 3, "vectors.txt, line 2: not a word and 3 numbers"),
        ("cat 1 2 3", 3, "vectors.txt: has a vector of none of the 3 words"),
        (None, 3, "vectors.txt: the word vectors cannot be read .No such file"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, text, dim, message):
    if text is not None:
        (tmp_path / "vectors.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        read_word_vectors(tmp_path / "vectors.txt", IDS, dim)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=4, val=2, test=2)


class AtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.embedding = module.captioner.decoder.embedding.weight.detach().clone()


def test_a_run_begins_with_the_files_vectors_and_resumes_without_the_file(shapes, tmp_path, capsys):
    path: Path = tmp_path / "vectors.txt"

    def fit(*, vectors: str | None, **options) -> tuple[Tensor, CaptioningModule, pl.Trainer]:
        start = AtStart()
        module = make_module(SoftAttention(AdditiveScore(10)), word_vectors=vectors)
        trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=2 if options else 1, callbacks=[start])
        run_stage(trainer.fit, module, make_data(shapes), **options)
        return start.embedding, module, trainer

    random, module, _ = fit(vectors=None)
    vocabulary = module.vocabulary
    known = [vocabulary.words[place] for place in (2, 6)]
    path.write_text("".join(f"{word} {' '.join(['0.25'] * 9)}\n" for word in [*known, "unheard"]))
    capsys.readouterr()
    found, module, trainer = fit(vectors=str(path))
    changed = (found != random).any(dim=1).nonzero().flatten().tolist()
    assert changed == vocabulary.encode(known) and (found[changed] == 0.25).all()
    printed = re.search(r"vectors\.txt: vectors of 2 of (\d+) words", capsys.readouterr().out)
    assert int(printed.group(1)) == len(vocabulary.words)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    path.unlink()
    resumed, _, _ = fit(vectors=str(path), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert torch.equal(resumed, module.captioner.decoder.embedding.weight)
