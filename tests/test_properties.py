"""What must hold of any captions, lengths, masks, beams and samplers, on examples that hypothesis makes up.

Each claim is checked on a few examples in the quick tests, and on many more in the slow ones.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from captioning.attention import AdditiveScore, Attention, HardAttention, SoftAttention
from captioning.data.batch import pad_captions
from captioning.data.folder import FolderSource, hashed_split
from captioning.data.records import CaptionIndex, ImageEntry, PackedStrings, image_name
from captioning.data.sampler import CaptionBatchSampler
from captioning.decoding import BeamOptions, Constraints, Step, beam_search, greedy, sample
from captioning.encoders import ConvEncoder
from captioning.errors import InputError, printable
from captioning.model import AttentionDecoder, SummedOutput
from captioning.model.captioner import Captioner
from captioning.objective.reductions import caption_nll
from captioning.tokenizers import PUNCTUATION, tokenize, tokenize_all
from captioning.trace import AttentionTrace
from captioning.vocabulary import END, PAD, SPECIALS, START, UNK, Vocabulary

EXAMPLES = pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.slow)])


def holds(examples: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Check the decorated claim on that many examples, the same ones every time."""

    def check(claim: Callable[..., None]) -> None:
        options = settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        options(given(*strategies)(claim))()

    return check


letters = st.characters(exclude_categories=["Cs"])  # no halves of pairs of surrogates, which are refused
texts = st.text(letters, max_size=40)
sentences = st.lists(
    st.sampled_from("a dog can't cannot the U.S. gonna -- ... (red) x,y 3.5 \n \t".split(" ")), max_size=9
)
captions = st.one_of(texts, sentences.map(" ".join))
words = st.text(letters, min_size=1, max_size=8).filter(lambda word: word not in SPECIALS)

# Captions, words and ids


@EXAMPLES
def test_many_captions_are_tokenised_as_one_by_one(examples):
    @holds(examples, st.lists(captions, max_size=8))
    def claim(given_texts):
        tokens = [tokenize(text) for text in given_texts]
        assert tokenize_all(given_texts) == [" ".join(words) for words in tokens]
        for word in itertools.chain.from_iterable(tokens):
            assert word and not any(letter.isspace() for letter in word)
            assert word not in PUNCTUATION and word == word.lower()


@EXAMPLES
def test_words_of_a_vocabulary_come_back_and_others_become_unk(examples, tmp_path):
    @holds(examples, st.lists(words, unique=True, max_size=8), st.lists(words, max_size=8))
    def claim(kept, said):
        vocabulary = Vocabulary(kept)
        ids = vocabulary.encode(said)
        assert all(UNK <= i < len(vocabulary) for i in ids)
        assert vocabulary.decode([START, *ids, END, *ids]) == [w if w in kept else "<unk>" for w in said]
        vocabulary.save(tmp_path / "words.json")
        assert Vocabulary.load(tmp_path / "words.json") == vocabulary


@EXAMPLES
def test_a_vocabulary_has_the_words_that_are_frequent_enough_and_no_others(examples):
    @holds(examples, st.lists(st.lists(st.sampled_from("abcdef"), max_size=9), max_size=6), st.integers(1, 4))
    def claim(said, min_count):
        counts = Counter(itertools.chain.from_iterable(said))
        vocabulary = Vocabulary.build(said, min_count=min_count)
        assert set(vocabulary.words) == {word for word, count in counts.items() if count >= min_count}
        assert [counts[word] for word in vocabulary.words] == sorted(
            (counts[w] for w in vocabulary.words), reverse=True
        )
        assert Vocabulary.build(said, min_count=min_count, max_size=2).words == vocabulary.words[:2]


@EXAMPLES
def test_packed_strings_are_the_strings(examples):
    @holds(examples, st.lists(texts, max_size=9), st.integers(0, 9))
    def claim(strings, limit):
        packed = PackedStrings.pack(strings)
        assert list(packed) == strings and [packed[i - len(strings)] for i in range(len(strings))] == strings
        assert list(packed.take(limit)) == strings[:limit]


@EXAMPLES
def test_an_index_has_every_caption_beside_its_image(examples):
    said = st.lists(st.sampled_from(["a", "a dog", "the dog runs", ""]), max_size=4)

    @holds(examples, st.lists(said, min_size=1, max_size=6).filter(lambda images: any(map(any, images))))
    def claim(images):
        index = CaptionIndex.build(Path(), [ImageEntry(i, f"{i}.png", list(texts)) for i, texts in enumerate(images)])
        kept = {i: [caption for caption in texts if caption] for i, texts in enumerate(images)}
        kept = {i: texts for i, texts in kept.items() if texts}
        assert {int(i): index.references(row) for row, i in enumerate(index.image_ids)} == kept
        assert index.caption_lengths.tolist() == [len(c.split()) for texts in kept.values() for c in texts]


@EXAMPLES
def test_names_of_images_stay_in_their_folder_or_are_refused(examples, tmp_path):
    parts = st.lists(st.one_of(st.sampled_from(["..", ".", "", "~", "a", "b.png"]), texts), min_size=1, max_size=4)

    @holds(examples, parts.map("/".join))
    def claim(name):
        try:
            image_name(name, allow_outside=False, where="x")
        except InputError:
            return
        assert (tmp_path / name).resolve().is_relative_to(tmp_path.resolve())


@EXAMPLES
def test_a_folder_says_the_same_in_json_lines_and_in_csv(examples, tmp_path):
    names = st.text(letters.filter(lambda x: x not in "\0/\r\n"), min_size=1, max_size=6).filter(lambda n: n != "..")
    rows = st.lists(st.tuples(names, captions), min_size=1, max_size=8)

    @holds(examples, rows)
    def claim(rows):
        lines = [{"image": name, "caption": caption} for name, caption in rows]
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["image", "caption"], quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(lines)
        for split in ("train", "val", "test"):
            said = {}
            for name in ("x.jsonl", "x.csv"):
                said[name] = []
                with contextlib.suppress(InputError):  # no image with a word in this split
                    index = FolderSource(str(tmp_path), captions=name).index(split)
                    said[name] = [(index.paths[row], index.references(row)) for row in range(len(index))]
            assert said["x.jsonl"] == said["x.csv"]
            assert all(hashed_split(name) == split for name, _ in said["x.csv"])


@EXAMPLES
def test_what_a_terminal_is_shown_is_one_line_without_controls(examples):
    @holds(examples, st.text(max_size=40))
    def claim(text):
        shown = printable(text)
        assert len(shown.splitlines()) <= 1 and "\x1b" not in shown
        if text.isascii() and text.isprintable():
            assert shown == text


# Lengths and masks

V, D, E, H = 11, 6, 5, 7
id_lists = st.lists(st.lists(st.integers(UNK, V - 1), max_size=6), min_size=1, max_size=4)


@EXAMPLES
def test_padded_captions_have_their_words_and_lengths(examples):
    @holds(examples, id_lists)
    def claim(ids):
        padded, lengths = pad_captions(ids)
        assert lengths.tolist() == [len(words) + 1 for words in ids]
        assert padded.shape == (len(ids), max(lengths) + 1)
        for row, words in zip(padded.tolist(), ids, strict=True):
            assert row == [START, *words, END] + [PAD] * (len(row) - len(words) - 2)


def make_decoder(kind: str) -> AttentionDecoder:
    attention: type[Attention] = HardAttention if kind == "hard" else SoftAttention
    output = SummedOutput() if kind == "summed" else None
    decoder = AttentionDecoder(attention(AdditiveScore(4)), embedding_dim=E, hidden_dim=H, output=output)
    torch.manual_seed(0)
    decoder.build(V, D, None)
    return decoder.eval()


@pytest.mark.parametrize("kind", ["soft", "hard", "summed"])
@EXAMPLES
def test_a_masked_batch_has_the_loss_of_its_captions_alone(examples, kind):
    """Neither the padding of captions nor that of regions is seen, whatever is in it."""
    decoder = make_decoder(kind)

    @holds(examples, id_lists, st.lists(st.integers(1, 5), min_size=4, max_size=4), st.floats(-1e3, 1e3), st.data())
    @torch.no_grad()
    def claim(ids, regions, garbage, data):
        seed = data.draw(st.integers(0, 99))
        regions = regions[: len(ids)]
        a = torch.randn(len(ids), max(regions) + 1, D, generator=torch.Generator().manual_seed(seed))
        mask = torch.arange(a.shape[1]) < torch.tensor(regions).unsqueeze(1)
        a[~mask] = garbage
        padded, lengths = pad_captions(ids)
        together = decoder(padded, lengths, decoder.encode(a, mask))
        alone = []
        for row, words in enumerate(ids):
            output = decoder(*pad_captions([words]), decoder.encode(a[row : row + 1, : regions[row]]))
            alone.append(caption_nll(output.logits, output.targets) * (len(words) + 1))
        whole = caption_nll(together.logits, together.targets) * lengths.sum()
        torch.testing.assert_close(whole, torch.stack(alone).sum(), rtol=1e-4, atol=1e-4)
        assert int(together.mask.sum()) == int(lengths.sum()) == len(together.targets)
        steps = together.trace.alphas[together.mask]
        torch.testing.assert_close(steps.sum(-1), torch.ones(len(steps)))
        rows = together.mask.nonzero()[:, 0]
        assert not steps[~mask[rows]].any()


# Beams

tables = st.integers(0, 10_000).map(
    lambda seed: torch.randn(7, 7, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
)
TABLE_WORDS, LONGEST = range(4, 7), 4


def steps_of(table: torch.Tensor) -> Callable[..., Step]:
    def step(tokens, state):
        nothing = torch.zeros(len(tokens), 1)
        return Step(table[tokens], state, AttentionTrace(nothing, None, tokens))

    return step


def log_prob(table: torch.Tensor, path: list[int]) -> float:
    return sum(float(table[before, after]) for before, after in itertools.pairwise(path))


def start() -> tuple[torch.Tensor]:
    return (torch.zeros(1, 1),)


@EXAMPLES
def test_hypotheses_are_distinct_ranked_and_scored_by_their_words(examples):
    options = st.tuples(st.integers(1, 90), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, LONGEST - 1))

    @holds(examples, tables, options)
    def claim(table, options):
        width, normalization, shortest = options
        search = {"length_normalization": normalization, "max_length": LONGEST}
        search["constraints"] = Constraints(min_length=shortest)
        (beams,) = beam_search(steps_of(table), start(), beam_size=width, **search)
        assert 1 <= len(beams) <= width
        assert [(not h.finished, -h.log_prob) for h in beams] == sorted((not h.finished, -h.log_prob) for h in beams)
        assert len({tuple(h.ids) for h in beams}) == len(beams)
        for h in beams:
            path = [START, *h.ids, *([END] if h.finished else [])]
            assert set(h.ids) <= set(TABLE_WORDS) and len(h.ids) >= shortest
            steps = len(path) - 1
            assert h.log_prob == pytest.approx(log_prob(table, path) / steps**normalization, abs=1e-4)
            assert sum(h.log_probs) == pytest.approx(log_prob(table, path), abs=1e-4) and len(h.log_probs) == steps


@EXAMPLES
def test_no_beam_finds_more_than_there_is_and_the_widest_finds_the_best(examples):
    @holds(examples, tables)
    def claim(table):
        best = max(
            log_prob(table, [START, *ids, END])
            for length in range(LONGEST)
            for ids in itertools.product(TABLE_WORDS, repeat=length)
        )
        for width in (1, 2, 4, 9):
            (beams,) = beam_search(steps_of(table), start(), beam_size=width, max_length=LONGEST)
            assert all(h.log_prob <= best + 1e-4 for h in beams if h.finished)
        (beams,) = beam_search(steps_of(table), start(), beam_size=3**LONGEST * 2, max_length=LONGEST)
        assert beams[0].log_prob == pytest.approx(best, abs=1e-4)
        (narrow,) = beam_search(steps_of(table), start(), beam_size=1, max_length=LONGEST)
        (first,) = greedy(steps_of(table), start(), max_length=LONGEST)
        (drawn,) = sample(steps_of(table), start(), top_k=1, max_length=LONGEST)
        assert narrow[0].ids == first.ids == drawn.ids


@pytest.mark.parametrize("kind", ["soft", "hard", "summed"])
@EXAMPLES
def test_the_scores_of_a_search_are_those_of_forced_decoding(examples, kind):
    decoder = make_decoder(kind)
    encoder = ConvEncoder((3, D), (2, 2), image_size=12)
    captioner = Captioner(encoder, decoder, vocabulary_size=V).eval()
    for name, parameter in decoder.named_parameters():
        if "output" in name or "score" in name:
            torch.nn.init.normal_(parameter, 0, 2)

    @holds(examples, st.integers(0, 999), st.integers(1, 4), st.sampled_from([0.0, 0.8]))
    @torch.no_grad()
    def claim(seed, width, normalization):
        memory = captioner.encode(annotations=torch.randn(2, 9, D, generator=torch.Generator().manual_seed(seed)))
        options = BeamOptions(beam_size=width, max_length=7, length_normalization=normalization)
        for image, beams in enumerate(captioner.search(memory, options)):
            for h in (h for h in beams if h.finished):
                (forced,) = captioner.force_decode(memory.select(torch.tensor([image])), [h.ids])
                assert h.log_probs == pytest.approx(forced.log_probs, abs=1e-4)
                assert h.log_prob == pytest.approx(forced.log_prob / len(h.log_probs) ** normalization, abs=1e-4)
                torch.testing.assert_close(h.trace.alphas, forced.trace.alphas, rtol=1e-4, atol=1e-4)


# Samplers

per_image = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=9)


@pytest.mark.parametrize("group", ["length", "image"])
@EXAMPLES
def test_every_caption_is_met_once_an_epoch_also_in_a_resumed_one(examples, group):
    @holds(examples, per_image, st.integers(1, 7), st.integers(1, 3), st.integers(0, 9), st.data())
    def claim(lengths, batch_size, ranks, seed, data):
        flat = torch.tensor(list(itertools.chain.from_iterable(lengths)))
        image = torch.tensor([i for i, captions in enumerate(lengths) for _ in captions])
        make = lambda rank: CaptionBatchSampler(  # noqa: E731
            flat, image, batch_size=batch_size, seed=seed, rank=rank, world_size=ranks, group=group
        )
        samplers = [make(rank) for rank in range(ranks)]
        for _ in range(2):
            epochs = [list(sampler) for sampler in samplers]
            assert len({len(epoch) for epoch in epochs}) == 1 and len(epochs[0]) == len(samplers[0])
            met = Counter(caption for epoch in epochs for batch in epoch for caption in batch)
            assert set(met) == set(range(len(flat)))
            biggest = 1 if group == "length" else max(map(len, lengths))
            assert met.total() - len(met) <= (ranks - 1) * biggest
        done = data.draw(st.integers(0, len(samplers[0])))
        whole = make(0)
        first = list(whole)
        state = json.loads(json.dumps(whole.state_dict(done)))
        resumed = make(0)
        resumed.load_state_dict(state)
        assert list(resumed) == (first[done:] if done < len(first) else list(whole))
