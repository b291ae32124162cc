"""METEOR against the toolkit's own class, with odd captions, and with a Java that misbehaves."""

import itertools
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from captioning.errors import InputError
from captioning.metrics.meteor import meteor_counts, meteor_metric
from captioning.metrics.table import caption_metrics
from captioning.tokenizers import PennTreebank

SENTENCES = """a dog runs over the green grass
two dogs are running in the grass
a brown dog jumps into the water
a man is riding a wave on a surfboard
the men ride bicycles down a steep hill
a little girl in a red dress smiles
children play football on a field
an old woman sits on a wooden bench beside the lake""".splitlines()


def make_corpus(seed: int, images: int = 24):
    random.seed(seed)
    references = [[s.split() for s in random.sample(SENTENCES, random.randint(1, 4))] for _ in range(images)]
    hypotheses = [random.choice(SENTENCES).split() for _ in range(images)]
    for words in hypotheses[::3]:
        random.shuffle(words)
    hypotheses[::5] = [of_image[0] for of_image in references[::5]]  # identical: no fragmentation
    hypotheses[1] = ["zebra"]
    return hypotheses, references


ODD = {  # captions that would break METEOR's lines: the caption, its references, and whether they agree
    "empty": ([], [["a", "dog"]], False),
    "both empty": ([], [[]], False),
    "separator": (["|||"], [["a"]], False),
    "separator in a word": (["a|||dog"], [["a", "dog"]], True),
    "separator in a reference": (["a", "dog"], [["a", "|||", "dog"]], True),
    "line break": (["a\ndog"], [["a\r\ndog"]], True),
    "command": (["EVAL", "1.0"], [["SCORE", "x"]], False),
    "letters": (["café", "日本", "dog"], [["café", "日本", "dog"]], True),
}


@pytest.mark.java
@pytest.mark.slow
def test_meteor_equals_the_coco_toolkit():
    Meteor = pytest.importorskip("pycocoevalcap.meteor.meteor").Meteor
    hypotheses, references = make_corpus(0)
    odd_hypotheses, odd_references, agreeing = zip(*ODD.values(), strict=True)
    counts = meteor_counts([*hypotheses, *odd_hypotheses], [*references, *odd_references])
    assert meteor_metric(counts[len(hypotheses) :]) == pytest.approx(100 * np.array(agreeing, dtype=float)[:, None])
    counts = counts[: len(hypotheses)]
    gts = {i: [" ".join(words) for words in of_image] for i, of_image in enumerate(references)}
    res = {i: [" ".join(words)] for i, words in enumerate(hypotheses)}
    toolkit = Meteor()
    try:
        corpus, of_images = toolkit.compute_score(gts, res)
    finally:
        process = toolkit.meteor_p
        del toolkit  # ends the process, and leaves its pipes open
        process.stdout.close()
        process.stderr.close()
    assert meteor_metric(counts)[:, 0] / 100 == pytest.approx(of_images, abs=1e-9)
    assert 1.0 in of_images and 0.0 in of_images
    assert meteor_metric(counts.sum(axis=0)) / 100 == pytest.approx(corpus, abs=1e-9)


# "a dog runs over the green grass" against "the dogs ran in grass with friends", as METEOR 1.5 counts it: grass
# exactly, one stem, one synonym, of content words, and "the" of function words, in 3 chunks.
COUNTS = [7, 7, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 3, 4, 4]


def test_meteor_of_a_hand_computed_case():
    quality = (0.75 * (1 + 0.6 + 0.8) + 0.25) / (0.75 * 4 + 0.25 * 3)
    assert meteor_metric(np.array(COUNTS)) == pytest.approx(100 * quality * (1 - 0.6 * (3 / 4) ** 0.2))
    assert meteor_metric(np.zeros((2, 23))).tolist() == [[0.0], [0.0]]


TEXTS = [
    *SENTENCES,
    "A man's dog can't swim. That's it, isn't it? They're 'kids', he'd say",
    "You cannot; I'm gonna! 'Tis of the '90s at 5 o'clock",
    "A well-known brand's <unk>, and/or a t-shirt of 24/7 #art",
    '"Quoted" words: 1,000 people & 50% off on 3.5-inch TVs at 5:30',
    "café, black/white; a U.S. flag, player # 28 (fish eye)",
    "two!! or?! $5 a*b [sign] {x} one ---- more",
]
MARKS = "’ “ ” ‘ – — … \" ' - -- ... ! ? ; : , . ( ) <unk> # & / « » ` * !! ?!".split()  # noqa: RUF001


@pytest.mark.java
def test_words_are_those_of_the_toolkits_program(capfd):
    """Marks before, behind and between words; docs/languages.md excepts a closing quote before a word."""
    tokenizer = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer").PTBTokenizer()
    texts = [*TEXTS, TEXTS[len(SENTENCES)].replace("'", "’")]  # noqa: RUF001
    words = "One dog runs over green grass".split()
    for mark, place in itertools.product(MARKS, range(1, len(words))):
        before, after = " ".join(words[:place]), " ".join(words[place:])
        texts += [f"{before} {mark} {after}", f"{before}{mark} {after}"]
        texts += [f"{before} {mark}{after}"] * (mark != "’" or after[0] not in "dm")  # noqa: RUF001
    theirs = tokenizer.tokenize({i: [{"caption": text}] for i, text in enumerate(texts)})
    assert {text: PennTreebank().tokenize(text) for text in texts} == {
        text: theirs[i][0].split() for i, text in enumerate(texts)
    }


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a Java on the PATH that runs a line of Python."""
    monkeypatch.delenv("CAPTIONING_JAVA")

    def put(program: str) -> None:
        java = Path(tmp_path, "java")
        java.write_text(f"#!{sys.executable}\nimport sys\nlines = sys.stdin.read().splitlines()\n{program}\n")
        java.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    package = tmp_path / "site" / "pycocoevalcap"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    yield put
    sys.modules.pop("pycocoevalcap", None)  # otherwise later tests of this process find the empty package


def test_the_metrics_of_a_corpus_have_meteor_where_java_is(fake):
    fake(f"for line in lines: print(*{COUNTS})")
    values = caption_metrics([["a"], ["c", "d"]], [[["a", "b"]], [["c", "d"]]])
    assert values["meteor"] == pytest.approx(meteor_metric(2 * np.array(COUNTS)).item())
    assert "meteor" not in caption_metrics([["a"]], [[["a"]]], meteor=False)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit('Error: no memory\\nat x')", r"no METEOR: it failed \(exit code 1\): Error: no memory$"),
        ("print('Error: x\\nError: y')", r"no METEOR: it failed \(exit code 0\): Error: x$"),
        ("print('1.0 2.0')", r"no METEOR: it failed \(exit code 0\): 1.0 2.0$"),
        ("pass", r"no METEOR: it failed \(exit code 0\): no answer$"),
    ],
)
def test_a_failing_program_is_reported_in_one_line(fake, program, message):
    fake(program)
    with pytest.raises(InputError, match=message) as error:
        meteor_counts([["a"], ["b"]], [[["a"]], [["b"]]])
    assert "\n" not in str(error.value)


def test_a_missing_program_or_package_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CAPTIONING_JAVA")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"^no METEOR: no `java` on the PATH$"):
        meteor_counts([["a"]], [[["a"]]])
