import pytest
import torch

from captioning.attention import AdditiveScore, MultiHeadAttention, ScaledDotScore, SoftAttention
from captioning.checkpoint.load import SavedModel, check_vocabulary
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import AttentionDecoder, Captioner, TransformerDecoder
from captioning.tokenizers import PennTreebank
from captioning.vocabulary import END, PAD, SPECIALS, START, UNK, Vocabulary

CAPTIONS = [["a", "dog", "runs"], ["a", "dog"], ["a", "cat"], ["zebra", "cat"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A man riding a wave.", "a man riding a wave"),
        ("A dog, a cat; and (maybe) a bird!", "a dog a cat and -lrb- maybe -rrb- a bird"),
        ("A man’s “dog” isn’t here – or…", "a man 's dog is n't here or"),  # noqa: RUF001
        ("he says 'hello' at 5 o'clock", "he says hello at 5 o'clock"),
        ("a <unk> dog <end>", "a <unk> dog <end>"),
        ("Mr. Smith of the U.S. eats 3.5 apples", "mr smith of the u.s. eats 3.5 apples"),
        ("a cafe\u0301 and हिन्दी", "a cafe\u0301 and हिन्दी"),
        ("The dog's ball isn't red.", "the dog 's ball is n't red"),
        ('A sign says "STOP".', "a sign says stop"),
        ("a t-shirt with 3,000 dots", "a t-shirt with 3,000 dots"),
        ("They cannot see it... or can they?", "they can not see it or can they"),
        ("One sentence. Another one", "one sentence another one"),
        ("salt &amp; pepper -- on a #2 plate", "salt & pepper on a # 2 plate"),
        ("  two\n lines\t", "two lines"),
        ("A crème brûlée", "a crème brûlée"),
        (" . ", ""),
        ("", ""),
    ],
)
def test_captions_become_lower_case_words_without_punctuation(text, words):
    assert PennTreebank().tokenize(text) == words.split()
    assert PennTreebank().tokenize(words) == words.split()  # so that a caption that was written can be scored again


def test_frequent_words_come_first_ties_are_alphabetical_and_rare_words_are_left_out():
    assert Vocabulary.build(CAPTIONS).words == ("a", "cat", "dog", "runs", "zebra")
    assert Vocabulary.build(CAPTIONS, min_count=2).words == ("a", "cat", "dog")
    assert Vocabulary.build(CAPTIONS, max_words=1).words == ("a",)
    assert len(Vocabulary.build(CAPTIONS, max_words=1)) == 5


def test_an_unknown_word_becomes_unk_and_stays_visible_and_decoding_ends_at_end():
    vocabulary = Vocabulary.build(CAPTIONS)
    assert vocabulary.encode(["a", "unicorn"]) == [4, UNK]
    assert vocabulary.decode([4, UNK]) == ["a", "<unk>"]
    assert vocabulary.decode([START, 4, PAD, 6, END, 5, PAD]) == ["a", "dog"]


def test_a_special_token_in_a_caption_is_an_unknown_word():
    vocabulary = Vocabulary.build([["a", *SPECIALS]])
    assert vocabulary.words == ("a",) and vocabulary.encode(SPECIALS) == [UNK] * 4
    assert not any(special in vocabulary for special in SPECIALS)


def test_a_vocabulary_survives_a_file(tmp_path):
    vocabulary = Vocabulary(["crème", "a", "brûlée"])
    vocabulary.save(tmp_path / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "vocabulary.json") == vocabulary


@pytest.mark.parametrize("words", [["a", "b", "a"], ["a", "<unk>"]])
def test_words_must_be_distinct_and_ordinary(words):
    with pytest.raises(InputError, match=rf"distinct and not special tokens, got \['{words[-1]}'\] twice"):
        Vocabulary(words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[1]", "not a vocabulary file"),
        (b'{"words": "abc"}', "not a vocabulary file"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_named(tmp_path, content, message):
    path = tmp_path / "v.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"v\.json: {message}"):
        Vocabulary.load(path)


def test_weights_of_a_model_are_copied_into_one_with_further_words():
    """Also of tied embeddings, and where a layer is as large as the vocabulary."""
    words = Vocabulary(["a", "b", "c"])
    more = words.extended(["d", "e"])
    for make in (
        lambda: TransformerDecoder(
            MultiHeadAttention(ScaledDotScore(), heads=2), dim=16, layers=1, heads=2, tie_embeddings=True
        ),
        lambda: AttentionDecoder(SoftAttention(AdditiveScore(5)), embedding_dim=6, hidden_dim=len(more)),
    ):
        old, new = (
            Captioner(ConvEncoder((8, 8), (4, 4), image_size=48), make(), vocabulary_size=len(vocabulary))
            for vocabulary in (words, more)
        )
        SavedModel("old.ckpt", old, words, {}).load_into(new, more)
        embedding = new.decoder.embedding.weight
        assert torch.equal(embedding[: len(words)], old.decoder.embedding.weight)
        assert all(torch.equal(row, embedding[UNK]) for row in embedding[len(words) :])


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["b", "a"], "has the data's words in another order"), (["a"], r"\(1 words\) is not the data's \(2\)")],
)
def test_a_checkpoint_with_other_words_or_another_order_is_refused(words, problem):
    old, new = Vocabulary(words), Vocabulary(["a", "b"])
    with pytest.raises(InputError, match=f"^x: its vocabulary {problem}; use the data settings .* was trained with$"):
        check_vocabulary("x: its", old.words, new)
