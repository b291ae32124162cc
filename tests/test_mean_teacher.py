"""The mean teacher against its average by hand."""

from __future__ import annotations

import pytest
import torch

from captioning.attention import AdditiveScore, SoftAttention
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood
from captioning.objective.mean_teacher import MeanTeacher


def test_the_teacher_is_the_average_of_the_weights_and_the_term_the_mean_square_of_the_logits():
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(3)), embedding_dim=4, hidden_dim=6, dropout=0.0)
    captioner = Captioner(ConvEncoder((2,), (4,), image_size=16), decoder, vocabulary_size=7).train()
    images = torch.arange(2)
    batch = CaptionBatch(*pad_captions([[4, 5], [6]]), images, images, images, annotations=torch.randn(2, 5, 2))
    term = MeanTeacher(weight=0.3, decay=0.15)
    objective = Likelihood(attention_penalty=0.0, terms=[term]).connect(decoder.attention)

    weights = [[p.detach().clone() for p in decoder.parameters()]]
    assert objective(captioner, batch).logged["teacher_difference"] < 1e-12
    for _ in range(2):
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        weights.append([p.detach().clone() for p in decoder.parameters()])
        loss, logged, output = objective(captioner, batch)
    average = weights[0]
    for n in (1, 2):
        decay = min(0.15, (1 + n) / (10 + n))
        average = [decay * a + (1 - decay) * w for a, w in zip(average, weights[n], strict=True)]

    with torch.no_grad():
        for parameter, value in zip(decoder.parameters(), average, strict=True):
            parameter.copy_(value)
        taught = captioner(batch).logits
    expected = ((output.logits - taught) ** 2).mean()
    torch.testing.assert_close(logged["teacher_difference"], expected.detach())
    torch.testing.assert_close(loss, logged["nll"] + 0.3 * expected)
    assert not any("teacher" in name for name in objective.state_dict())


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"weight": -1.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(InputError):
        MeanTeacher(**options)
