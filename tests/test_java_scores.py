"""METEOR and SPICE against the toolkit's own classes, with odd captions, and with a Java that misbehaves."""

from __future__ import annotations

import os
import random
import stat
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from captioning.evaluation import java, metrics
from captioning.evaluation.java import (
    JavaError,
    meteor_counts,
    meteor_from_counts,
    missing_meteor,
    missing_spice,
    spice,
)
from captioning.tokenizers import PennTreebank, tokenize

SENTENCES = """a dog runs over the green grass
two dogs are running in the grass
a brown dog jumps into the water
a man is riding a wave on a surfboard
the men ride bicycles down a steep hill
a little girl in a red dress smiles
children play football on a field
an old woman sits on a wooden bench beside the lake""".splitlines()


@pytest.fixture(autouse=True)
def _java_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAPTIONING_JAVA", raising=False)


def make_corpus(seed: int, images: int = 24):
    random.seed(seed)
    references = [[s.split() for s in random.sample(SENTENCES, random.randint(1, 4))] for _ in range(images)]
    hypotheses = [random.choice(SENTENCES).split() for _ in range(images)]
    for words in hypotheses[::3]:
        random.shuffle(words)
    hypotheses[::5] = [of_image[0] for of_image in references[::5]]  # identical: no fragmentation
    hypotheses[1] = ["zebra"]
    return hypotheses, references


ODD = {
    "empty": ([], [["a", "dog"]]),
    "empty reference": (["a", "dog"], [[]]),
    "both empty": ([], [[]]),
    "separator": (["|||"], [["a"]]),
    "separator inside": (["a", "|||", "dog"], [["a", "dog"]]),
    "separator in a word": (["a|||dog"], [["a", "dog"]]),
    "separator in a reference": (["a", "dog"], [["a", "|||", "dog"]]),
    "line break": (["a\ndog"], [["a\r\ndog"]]),
    "command": (["EVAL", "1.0"], [["SCORE", "x"]]),
    "letters": (["café", "日本", "dog"], [["café", "日本", "dog"]]),
    "other letters": (["çäfè"], [["éüfö"]]),
    "lone surrogate": (["\ud800", "dog"], [["dog"]]),
    "long": (["a", "dog"] * 40, [["a", "dog"]]),
}


@pytest.fixture(scope="module")
def meteor():
    """A corpus, its counts and the scores of ``ODD``, from one start of Java."""
    if reason := missing_meteor():
        pytest.skip(reason)
    hypotheses, references = make_corpus(0)
    odd_hypotheses, odd_references = zip(*ODD.values(), strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "C")  # other letters than ASCII must not depend on the locale
        counts = meteor_counts([*hypotheses, *odd_hypotheses], [*references, *odd_references])
    odd = dict(zip(ODD, meteor_from_counts(counts[len(hypotheses) :]), strict=True))
    return hypotheses, references, counts[: len(hypotheses)], odd


@pytest.mark.java
def test_meteor_equals_the_coco_toolkit(meteor):
    from pycocoevalcap.meteor.meteor import Meteor

    hypotheses, references, counts, _ = meteor
    gts = {i: [" ".join(words) for words in of_image] for i, of_image in enumerate(references)}
    res = {i: [" ".join(words)] for i, words in enumerate(hypotheses)}
    toolkit = Meteor()
    try:
        corpus, of_images = toolkit.compute_score(gts, res)
        part, _ = toolkit.compute_score({i: gts[i] for i in range(9)}, {i: res[i] for i in range(9)})
    finally:
        process = toolkit.meteor_p
        del toolkit  # ends the process, and leaves its pipes open
        process.stdout.close()
        process.stderr.close()
    assert meteor_from_counts(counts) == pytest.approx(of_images, abs=1e-9)
    assert 1.0 in of_images and 0.0 in of_images
    assert meteor_from_counts(counts.sum(axis=0)) == pytest.approx(corpus, abs=1e-9)
    assert meteor_from_counts(counts[:9].sum(axis=0)) == pytest.approx(part, abs=1e-9)
    assert abs(np.mean(of_images) - corpus) > 1e-3, "the corpus' METEOR is no mean"


@pytest.mark.java
def test_meteor_takes_captions_that_would_break_its_lines(meteor):
    *_, values = meteor
    for name in ("empty", "empty reference", "both empty", "separator", "command", "other letters"):
        assert values[name] == 0, name
    for name in ("separator inside", "separator in a word", "separator in a reference", "line break", "letters"):
        assert values[name] == pytest.approx(1.0), name
    assert values["lone surrogate"] > 0 and 0 < values["long"] < 1


def test_meteor_of_a_hand_computed_case():
    # "a dog runs over the green grass" against "the dogs ran in grass with friends", as METEOR 1.5 counts it: grass
    # exactly, one stem, one synonym, of content words, and "the" of function words, in 3 chunks.
    counts = [7, 7, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 3, 4, 4]
    quality = (0.75 * (1 + 0.6 + 0.8) + 0.25) / (0.75 * 4 + 0.25 * 3)
    assert meteor_from_counts(np.array(counts)) == pytest.approx(quality * (1 - 0.6 * (3 / 4) ** 0.2))
    assert meteor_from_counts(np.zeros((2, 23))).tolist() == [0.0, 0.0]


@pytest.mark.java
def test_spice_equals_the_coco_toolkit():
    if reason := missing_spice():
        pytest.skip(reason)
    from pycocoevalcap.spice.spice import Spice

    hypotheses, references = make_corpus(1)
    gts = {i: [" ".join(words) for words in of_image] for i, of_image in enumerate(references)}
    res = {i: [" ".join(words)] for i, words in enumerate(hypotheses)}
    corpus, of_images = Spice().compute_score(gts, res)
    ours = spice(hypotheses, references)
    assert ours == pytest.approx([image["All"]["f"] for image in of_images], abs=1e-9)
    assert ours.mean() == pytest.approx(corpus, abs=1e-9)
    assert spice([[], *hypotheses], [references[0], *references])[0] == 0.0


AGREEING = [
    *SENTENCES,
    "A man's dog can't swim.",
    "You cannot; I'm gonna!",
    "A well-known brand, isn't it?",
    "A dog -- a cat",
]
AGREEING += ['"Quoted" words', "1,000 people & 50% off", "café", "black/white"]
# Caption -> what the toolkit's program makes of it: it keeps points in abbreviations, #, and brackets in lower case.
DIFFERING = {
    "A U.S. flag": "a u.s. flag",
    "Mr. Smith": "mr. smith",
    "player # 28": "player # 28",
    "a lens (fish eye)": "a lens -lrb- fish eye -rrb-",
    "slip 'n' slide": "slip 'n' slide",
}


@pytest.mark.java
def test_tokens_are_the_toolkits_but_for_abbreviations_brackets_and_signs(capfd):
    tokenizer = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer").PTBTokenizer()
    captions = [*AGREEING, *DIFFERING]
    theirs = tokenizer.tokenize({i: [{"caption": caption}] for i, caption in enumerate(captions)})
    ours = [" ".join(tokenize(caption)) for caption in captions]
    assert ours[: len(AGREEING)] == [theirs[i][0] for i in range(len(AGREEING))]
    assert dict(zip(DIFFERING, (theirs[len(AGREEING) + i][0] for i in range(len(DIFFERING))), strict=True)) == DIFFERING
    assert all(word not in DIFFERING.values() for word in ours[len(AGREEING) :])
    assert "not the COCO toolkit's" in PennTreebank.description


FAKE = """#!{python}
import json, sys, time
arguments = sys.argv[1:]
if "-version" in arguments:
    print('openjdk version "{version}"', file=sys.stderr)
    sys.exit()
text = sys.stdin.read()
{program}
"""
SCORE = """
given = json.load(open(arguments[arguments.index("-jar") + 2]))
words = lambda text: set(text.split())
of_images = [len(words(i["test"]) & words(i["refs"][0])) / len(words(i["refs"][0])) for i in given]
out = [{"image_id": i["image_id"], "scores": {"All": {"f": f}}} for i, f in zip(given, of_images)]
json.dump(out[::-1], open(arguments[arguments.index("-out") + 1], "w"))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a Java on the PATH that runs a few lines of Python, and a toolkit that has all its files."""
    toolkit = tmp_path / "toolkit"
    for name in ("meteor/meteor-1.5.jar", "meteor/data/paraphrase-en.gz", "spice/spice-1.0.jar"):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).touch()
    (toolkit / "spice/lib").mkdir()
    for end in ("", "-models"):
        (toolkit / f"spice/lib/stanford-corenlp-3.6.0{end}.jar").touch()
    monkeypatch.setattr(java, "_toolkit", lambda: toolkit)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def put(program: str, version: str = "1.8.0_292") -> Path:
        path = tmp_path / f"java {version}" / "java"
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.format(python=sys.executable, program=program, version=version))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return toolkit

    yield put
    assert list(temporary.iterdir()) == [], "a temporary file is left behind"


def test_spice_reads_scores_by_image_and_does_not_parse_empty_captions(fake):
    fake(SCORE)
    assert missing_spice() is None
    hypotheses = [["a"], [], ["c", "é"], ["d"]]
    references = [[["a", "b"]], [["b"]], [[], ["c", "é"]], [[]]]
    assert spice(hypotheses, references).tolist() == [0.5, 0.0, 1.0, 0.0]
    assert spice([[]], [[["a"]]]).tolist() == [0.0]


def test_the_scores_of_a_corpus_have_meteor_and_spice_where_java_is(fake):
    counts = [7, 7, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 3, 4, 4]
    answer = " ".join(map(str, counts))
    fake(
        f"if text:\n    print('\\n'.join(['{answer}'] * len(text.splitlines())))\nelse:" + SCORE.replace("\n", "\n    ")
    )
    values = metrics.caption_metrics([["a"], ["c", "d"]], [[["a", "b"]], [["c", "d"]]])
    assert values["meteor"] == pytest.approx(100 * meteor_from_counts(2 * np.array(counts)))
    assert "meteor" not in (metrics.caption_metrics([["a"]], [[["a"]]], java=False))


@pytest.mark.parametrize(
    ("score", "program", "message"),
    [
        (spice, "sys.exit('Error: no memory\\nat x')", r"SPICE failed \(exit code 1\): Error: no memory$"),
        (spice, "pass", "SPICE's result cannot be read"),
        (spice, SCORE.replace("out[::-1]", "out[:-1]"), "SPICE scored 1 of 2 images"),
        (spice, SCORE.replace("out[::-1]", "[1]"), "SPICE's result cannot be read"),
        (spice, "time.sleep(60)", "SPICE gave no output for 1 s and was ended"),
        (meteor_counts, "sys.exit(3)", r"METEOR failed \(exit code 3\): no message"),
        (meteor_counts, "print('Error: x\\nError: y')", "METEOR answered 'Error: x' where 23 numbers were expected"),
        (
            meteor_counts,
            "print('1.0 ' * 23 + '\\n1.0 2.0')",
            "METEOR answered '1.0 2.0' where 23 numbers were expected",
        ),
        (meteor_counts, "print('1.0 2.0')", r"METEOR gave 1 answers for 2 images: '1.0 2.0\\n'"),
        (meteor_counts, "pass", "METEOR gave 0 answers for 2 images: ''"),
        (meteor_counts, "time.sleep(60)", "METEOR gave no output for 1 s and was ended"),
        (meteor_counts, "print('1', flush=True)\ntime.sleep(60)", "METEOR gave no output for 1 s and was ended"),
    ],
)
def test_a_failing_program_is_reported_in_one_line_and_leaves_nothing_behind(
    fake, monkeypatch, score, program, message
):
    fake(program)
    assert missing_spice() is None and missing_meteor() is None
    monkeypatch.setattr(java, "_START_SECONDS", 1.0 if "sleep" in program else 60.0)
    monkeypatch.setattr(java, "_SPICE_SECONDS", 0.0)
    with pytest.raises(JavaError, match=message) as error:
        score([["a"], ["b"]], [[["a"]], [["b"]]])
    assert "\n" not in str(error.value)


def test_meteors_time_limit_is_that_of_one_answer_however_large_the_corpus(fake, monkeypatch):
    monkeypatch.setattr(java, "_START_SECONDS", 2.0)
    corpus = [["a"]] * 500, [[["a"]]] * 500
    fake("print('1 ' * 23, flush=True)\ntime.sleep(60)")
    with pytest.raises(JavaError, match="METEOR gave no output for 2 s"):
        meteor_counts(*corpus)
    fake("for _ in range(500):\n    print('1 ' * 23, flush=True)\n    time.sleep(0.006)")  # 3 s in all
    assert meteor_counts(*corpus).shape == (500, 23)


def test_what_is_missing_is_named(fake, monkeypatch, tmp_path):
    toolkit = fake(SCORE)
    (toolkit / "spice/lib/stanford-corenlp-3.6.0-models.jar").unlink()
    assert "python -m pycocoevalcap.spice.get_stanford_models" in str(missing_spice())
    (toolkit / "spice/spice-1.0.jar").unlink()
    assert missing_spice() == "pycocoevalcap lacks spice/spice-1.0.jar"
    assert missing_meteor() is None
    monkeypatch.setattr(java, "_toolkit", lambda: tmp_path / "none")
    assert missing_meteor() == "pycocoevalcap lacks meteor/meteor-1.5.jar"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_meteor() == missing_spice() == "no Java runtime: no `java` on the PATH"
    for score in (meteor_counts, spice):
        with pytest.raises(JavaError, match="no Java runtime"):
            score([["a"]], [[["a"]]])


@pytest.mark.parametrize(
    ("version", "fits"), [("1.8.0_292", True), ("14.0.2", True), ("15", False), ("17.0.15", False)]
)
def test_spice_needs_a_java_with_a_javascript_engine(fake, version, fits):
    fake(SCORE, version)
    assert (missing_spice() is None) == fits
    if not fits:
        assert f"this is Java {version.split('.')[0]}" in str(missing_spice())


def test_without_the_package_the_command_that_installs_it_is_named(fake, monkeypatch):
    fake(SCORE)
    monkeypatch.undo()
    monkeypatch.delenv("CAPTIONING_JAVA", raising=False)
    monkeypatch.setattr(java.shutil, "which", lambda name: "/bin/java")
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    assert missing_meteor() == missing_spice() == "pycocoevalcap is not installed: pip install -e '.[metrics]'"


@pytest.mark.parametrize("score", [meteor_counts, spice])
def test_missing_references_are_refused(score):
    with pytest.raises(ValueError, match="image 1 has no reference"):
        score([["a"], ["b"]], [[["a"]], []])
    with pytest.raises(ValueError, match="as many hypotheses"):
        score([["a"]], [])


def test_no_image_needs_no_java(fake):
    fake("sys.exit('must not run')")
    assert meteor_counts([], []).shape == (0, 23)
    assert spice([], []).shape == (0,)
