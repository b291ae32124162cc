"""Searches compare words in float32, whatever the model computes in: no two best words, one caption for one model."""

import contextlib

import pytest
import torch
from helpers_models import batch_of, most_probable_words

from captioning.attention import AdditiveScore, SoftAttention
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, SummedOutput
from captioning.model.captioner import Captioner
from captioning.vocabulary import UNK

B, L, D, V, T = 40, 4, 5, 6000, 8
WEIGHTS = {"bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@contextlib.contextmanager
def precision(name: str):
    with torch.inference_mode(), torch.autocast("cpu", AUTOCAST.get(name), enabled=name in AUTOCAST):
        yield


def make_captioner(name: str, output: SummedOutput | None = None) -> Captioner:
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(6)), embedding_dim=16, hidden_dim=12, output=output)
    captioner = Captioner(ConvEncoder((D,), (4,), image_size=8), decoder, vocabulary_size=V)
    torch.nn.init.normal_(decoder.output.L_z.weight, std=0.5)
    torch.nn.init.normal_(decoder.embedding.weight, std=0.5)
    torch.nn.init.constant_(decoder.output.L_o.bias, 8.0)  # changes no probability, and leaves few bits for the rest
    return captioner.eval().to(WEIGHTS.get(name, torch.float32))


def annotations(name: str) -> torch.Tensor:
    return torch.randn(B, L, D).to(WEIGHTS.get(name, torch.float32))


@pytest.mark.parametrize("output", [None, SummedOutput])
@pytest.mark.parametrize("name", ["32-true", *AUTOCAST, *WEIGHTS])
def test_beam_of_one_takes_the_most_probable_words_in_every_precision(name, output):
    captioner = make_captioner(name, output and output())
    with precision(name):
        memory = captioner.encode(annotations=annotations(name))
        expected = most_probable_words(captioner, memory, T)
        beams = captioner.search(memory, BeamOptions(beam_size=1, max_length=T))
    assert [beam[0].ids for beam in beams] == expected
    assert len(set(map(tuple, expected))) > B // 2  # the captions do differ


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true"])
def test_words_tie_in_bfloat16_but_not_in_a_search(name):
    captioner = make_captioner(name)
    batch = batch_of(torch.randint(UNK + 1, V, (B, T)).tolist(), annotations(name))
    with precision(name):
        memory = captioner.encode(annotations=batch.annotations)
        step, state = captioner.step_function(memory), captioner.decoder.init_state(memory)
        searched = []
        for words in batch.captions[:, :-1].T:
            out = step(words, state)
            searched.append(out.log_probs)
            state = out.state
        forced = captioner.teacher_force(batch, memory).logits
    ties = [
        float((values[:, UNK + 1 :].topk(2).values.diff() == 0).float().mean())
        for values in (forced, torch.cat(searched))
    ]
    assert forced.dtype == torch.bfloat16 and searched[0].dtype == torch.float32
    assert ties[0] > 0.2 and ties[1] == 0
