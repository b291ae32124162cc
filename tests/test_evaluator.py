"""A split is evaluated without a trainer, by several processes as by one; its files are read unchanged."""

import doctest
import json
import math

import pytest
import torch

from captioning.attention import AdditiveScore, Attention, HardAttention, SoftAttention
from captioning.data.batch import CaptionBatch
from captioning.data.loading import CaptionDataset
from captioning.data.regions import RegionsInView, named_regions
from captioning.data.shapes import ShapesSource
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder, Encoder
from captioning.evaluation import evaluate_model
from captioning.evaluation import evaluator as evaluator_module
from captioning.evaluation.caption_files import (
    CaptionedImage,
    read_captions,
    read_metrics,
    read_results,
    write_evaluation,
)
from captioning.evaluation.evaluator import Evaluator
from captioning.evaluation.grounding import grounding_metrics, noun_hits
from captioning.metrics.table import METRICS, caption_metrics
from captioning.model import AttentionDecoder, DeepOutput, Output, SummedOutput
from captioning.model.captioner import Captioner
from captioning.model.ensemble import Ensemble
from captioning.objective import reductions
from captioning.vocabulary import Vocabulary

IMAGES = 5


class Split:
    """Five images of shapes with their objects, and a captioner with random weights."""

    def __init__(self, source: ShapesSource, attention: Attention, output: Output | None = None) -> None:
        source.prepare()
        torch.manual_seed(3)
        encoder = ConvEncoder((8, 12), (4, 2), image_size=48)
        self.index = source.index("val")
        self.vocabulary = Vocabulary.build(text.split() for text in self.index.captions)
        decoder = AttentionDecoder(attention, embedding_dim=9, hidden_dim=14, output=output)
        self.captioner = Captioner(encoder, decoder, vocabulary_size=len(self.vocabulary)).eval()
        self.dataset = CaptionDataset(self.index, self.vocabulary, encoder.preprocessing, by_image=True)
        self.regions = RegionsInView(source, "val", self.index, encoder)

    def batch(self, *rows: int) -> CaptionBatch:
        return self.dataset[list(rows)]

    def evaluator(self, *batches: CaptionBatch, **options) -> Evaluator:
        search = BeamOptions(beam_size=2, max_length=9)
        evaluator = Evaluator(self.captioner, self.vocabulary, self.index, self.regions, search=search, **options)
        for batch in batches:
            evaluator.update(batch)
        return evaluator


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShapesSource:
    return ShapesSource(str(tmp_path_factory.mktemp("data")), image_size=48, train=2, val=IMAGES, test=2)


@pytest.fixture
def split(source) -> Split:
    return Split(source, SoftAttention(AdditiveScore(10)))


def test_a_split_is_scored_on_its_captions_and_its_references(split):
    batches = [split.batch(0, 1, 2), split.batch(3, 4)]
    evaluator = split.evaluator(*batches)
    scores, images = evaluator.compute_metrics(), evaluator.captioned_images
    assert [image.image_id for image in images] == split.index.image_ids.tolist()
    assert [image.references for image in images] == [split.index.references(row) for row in range(IMAGES)]
    expected = caption_metrics([i.words for i in images], [i.reference_words for i in images], meteor=False)
    assert {name: scores[name] for name in expected} == expected
    nll, words = 0.0, 0
    for row in range(IMAGES):  # image by image, without the padding of a batch
        with torch.no_grad():
            output = split.captioner(split.batch(row))
        nll += float(reductions.step_nll(output.logits, output.targets).double().sum())
        words += sum(len(text.split()) + 1 for text in split.index.references(row))
    assert scores["nll"] == pytest.approx(nll / words, rel=1e-5)
    judged = [hit for image in images for hit in image.reference_hits]
    assert len(judged) > IMAGES
    for row, image in enumerate(images):
        (alone,) = split.evaluator(split.batch(row)).captioned_images
        assert [(h.step, h.noun) for h in image.reference_hits] == [(h.step, h.noun) for h in alone.reference_hits]
    assert scores["reference_pointing_accuracy"] == pytest.approx(100 * sum(h.hit for h in judged) / len(judged))
    assert "bound" not in scores


def test_without_references_there_are_captions_and_no_metrics(split):
    evaluator = split.evaluator(split.batch(0, 1), with_references=False)
    assert evaluator.compute_metrics() == {} and [image.image_id for image in evaluator.captioned_images] == [
        *split.index.image_ids[:2]
    ]


@pytest.mark.parametrize("result", ["images", "sums", "figure_hypotheses"])
def test_results_are_no_options_of_an_evaluator(split, result):
    with pytest.raises(TypeError, match=result):
        split.evaluator(**{result: {}})


def test_a_model_is_evaluated_on_a_data_set_in_one_call(split, source):
    search = BeamOptions(beam_size=2, max_length=9)
    result = evaluate_model(split.captioner, split.vocabulary, source, search, split="val", batch_size=2)
    by_hand = split.evaluator(split.batch(0, 1), split.batch(2, 3), split.batch(4))
    assert result.captioned_images == by_hand.captioned_images and result.compute_metrics() == by_hand.compute_metrics()
    assert set(result.compute_metrics()) <= set(METRICS)
    first = evaluate_model(split.captioner, split.vocabulary, source, search, split="val", limit_images=2)
    assert first.captioned_images == result.captioned_images[:2]


def test_no_repeat_ngram_holds_for_evaluated_captions(split, source):
    plain, unique = (
        [
            image.words
            for image in evaluate_model(split.captioner, split.vocabulary, source, search, split="val").captioned_images
        ]
        for search in (BeamOptions(max_length=9), BeamOptions(max_length=9, no_repeat_ngram=1))
    )
    assert any(len({*words}) < len(words) for words in plain)
    assert all(len({*words}) == len(words) for words in unique)


def test_an_ensemble_of_other_views_loads_its_images_itself(split, source, monkeypatch):
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(10)), embedding_dim=9, hidden_dim=14)
    other = Captioner(ConvEncoder((8, 12), (4, 2), image_size=32), decoder, vocabulary_size=len(split.vocabulary))
    search = BeamOptions(beam_size=2, max_length=9)
    members = [split.captioner, other.eval()]

    def load(rows, preprocessing):
        return torch.stack([preprocessing(split.index.image(row, preprocessing)) for row in rows.tolist()])

    ensemble, split.captioner = Ensemble(members), Ensemble(members, load_images=load).eval()
    monkeypatch.delattr(Encoder, "identity")  # it reads all weights, so an ensemble asks for it once
    result = evaluate_model(ensemble, split.vocabulary, source, search, split="val", batch_size=2)
    by_hand = split.evaluator(split.batch(0, 1), split.batch(2, 3), split.batch(4))
    assert result.captioned_images == by_hand.captioned_images and result.compute_metrics() == by_hand.compute_metrics()


def test_the_example_of_evaluate_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(evaluator_module) == doctest.TestResults(failed=0, attempted=6)


@pytest.mark.parametrize("output", [SummedOutput, DeepOutput])
def test_the_evidence_is_judged_beside_the_alphas(source, tmp_path, output):
    split = Split(source, SoftAttention(AdditiveScore(10)), output())
    batch = split.batch(0, 1, 2)
    evaluator = split.evaluator(batch)
    scores, images = evaluator.compute_metrics(), evaluator.captioned_images
    with torch.inference_mode():
        trace = split.captioner(batch).trace
        evidence = split.captioner.evidence(batch, split.captioner.encode_batch(batch))
    judged = {False: [], True: []}
    for number, image_index in enumerate(batch.image_index.tolist()):
        words = split.vocabulary.decode(batch.captions[number, 1 : batch.lengths[number]].tolist())
        for by_evidence, weights in ((False, trace.alphas), (True, evidence)):
            regions = named_regions(words, split.regions.object_regions(image_index))
            judged[by_evidence] += noun_hits(words, weights[number].numpy(), regions, split.captioner.encoder.cells)
    by_alphas, by_posterior = (
        grounding_metrics([CaptionedImage(image_id=0, caption="", references=[], hits=judged[key])])
        for key in (False, True)
    )
    by_evidence = {"pointing_accuracy": "pointing_evidence", "attention_correctness": "correctness_evidence"}
    for measure, of_evidence in by_evidence.items():
        assert scores[f"reference_{measure}"] == pytest.approx(by_alphas[measure])
        assert scores[f"reference_{of_evidence}"] == pytest.approx(by_posterior[measure])
    assert by_alphas["attention_correctness"] != pytest.approx(by_posterior["attention_correctness"], rel=1e-3)
    assert [len(image.evidence_hits) for image in images] == [len(image.hits) for image in images]
    write_evaluation(tmp_path, "test", scores, images, conditions={})
    assert read_captions(tmp_path / "test_captions.json") == {image.image_id: image for image in images}


def test_processes_that_share_a_split_have_the_metrics_of_one_process(split):
    first, second, third = split.batch(0, 1), split.batch(2), split.batch(3, 4)
    expected = split.evaluator(first, second, third)
    shared = split.evaluator()
    for part in (split.evaluator(third), split.evaluator(), split.evaluator(first, second), split.evaluator(third)):
        shared.images |= part.images  # the third batch counts once
        shared.sums |= part.sums
    assert (
        shared.captioned_images == expected.captioned_images and shared.compute_metrics() == expected.compute_metrics()
    )


def test_draws_of_bounds_depend_on_batch_and_seed_and_leave_the_global_generator_unchanged(source):
    split = Split(source, HardAttention(AdditiveScore(10), context_mode="sample"))
    first, second = split.batch(0, 1), split.batch(2, 3)
    before = torch.get_rng_state()
    both = split.evaluator(first, second, bound_draws=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    alone = split.evaluator(second, bound_draws=2)
    assert alone.sums[2] == both.sums[2] and alone.images[3] == both.images[3]
    scores = both.compute_metrics()
    assert -math.inf < scores["bound"] <= scores["iwae_bound"] < 0
    unbounded = split.evaluator(second)  # its captions were searched with the same draws
    assert unbounded.images[3] == both.images[3]
    assert split.evaluator(second, bound_draws=2, seed=1).sums[2]["bound"] != both.sums[2]["bound"]


def test_written_captions_and_metrics_are_read_unchanged(split, tmp_path):
    evaluator = split.evaluator(split.batch(0, 1, 2))
    scores, images = evaluator.compute_metrics(), evaluator.captioned_images
    write_evaluation(tmp_path, "test", scores, images, conditions={"beam_size": 2}, tokens="letters")
    assert read_results(tmp_path / "test_results.json") == {image.image_id: image.caption for image in images}
    assert json.loads((tmp_path / "test_metrics.json").read_text())["tokens"] == "letters"
    assert read_metrics(tmp_path / "test_metrics.json") == (scores, {"beam_size": 2})
    assert read_captions(tmp_path / "test_captions.json") == {image.image_id: image for image in images}
    assert any(image.hits for image in images) or any(image.reference_hits for image in images)
    entry = json.loads((tmp_path / "test_captions.json").read_text())[0]
    judged = ["hits", "reference_hits", "evidence_hits", "reference_evidence_hits"]
    assert list(entry) == ["image_id", "file", "caption", "log_prob", "finished", "references", *judged]
