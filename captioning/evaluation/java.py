"""METEOR and SPICE: the COCO toolkit's Java programs, where Java and pycocoevalcap are installed.

``CAPTIONING_JAVA=off`` in the environment leaves both out.

The toolkit's own classes are not used: they keep a process waiting as long as Python runs, mix up METEOR's answers
after a caption with a line break, have no time limit, and write temporary files into the installed package. Each call
here starts one process, sends it all captions, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from captioning.evaluation.ngrams import Words

Floats = NDArray[np.float64]

METEOR_COUNTS = 23
_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75  # METEOR 1.5's parameters for English, task "rank"
_STAGES = np.array([1.0, 0.6, 0.8, 0.6])  # weights of exact matches, stems, synonyms and paraphrases
# Time limits without output, far above the usual times. METEOR needs 4 s to start and answers each image within some
# milliseconds. SPICE is silent until it has scored all images.
_START_SECONDS = 120.0
_SPICE_SECONDS = 2.0  # for each image


class JavaError(RuntimeError):
    """One of the Java programs failed. The message is one line."""


def missing_meteor() -> str | None:
    """Return why METEOR cannot be computed, in one line, or None."""
    return _missing("meteor/meteor-1.5.jar", "meteor/data/paraphrase-en.gz")


def missing_spice() -> str | None:
    """Return why SPICE cannot be computed, in one line, or None."""
    if reason := _missing("spice/spice-1.0.jar"):
        return reason
    version = _java_version()
    if version is None or version > 14:
        reason = "this one does not start" if version is None else f"this is Java {version}"
        return f"SPICE 1.0 needs the JavaScript engine of Java up to version 14; {reason}"
    models = ("spice/lib/stanford-corenlp-3.6.0.jar", "spice/lib/stanford-corenlp-3.6.0-models.jar")
    if _missing(*models):
        return "SPICE's parser is not installed: python -m pycocoevalcap.spice.get_stanford_models downloads it"
    return None


def meteor_counts(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return the counts that corpus METEOR sums over images.

    METEOR's separator ``|||`` is removed from words.

    Returns:
        (images, 23): words of the caption and of its best reference; function words of both; for the four kinds of
        matches, the content words and the function words of both; chunks; matched words of both.

    Raises:
        JavaError: METEOR is not available, fails, or takes too long.
        ValueError: The lists differ in length, or an image has no reference.
    """
    _check(hypotheses, references)
    if reason := missing_meteor():
        raise JavaError(reason)
    if not hypotheses:
        return np.zeros((0, METEOR_COUNTS))
    lines = [
        " ||| ".join(["SCORE", *(_one_line(reference) for reference in image_references), _one_line(hypothesis)])
        for hypothesis, image_references in zip(hypotheses, references, strict=True)
    ]
    jar = _toolkit() / "meteor" / "meteor-1.5.jar"
    output = _run(
        ["-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"],
        "METEOR",
        _START_SECONDS,
        text="".join(line + "\n" for line in lines),
    )
    answers = output.splitlines()
    if len(answers) != len(lines):
        raise JavaError(f"METEOR gave {len(answers)} answers for {len(lines)} images: {output[:100]!r}")
    counts = np.array([_meteor_answer(answer) for answer in answers])
    # METEOR does not count the single chunk of a caption whose words all match in a row.
    matches = counts[:, 4:20].reshape(-1, 8, 2).sum(axis=1)
    counts[(matches == counts[:, 0:2]).all(axis=1) & (counts[:, 20] == 1), 20] = 0
    return counts


def meteor_from_counts(counts: Floats) -> Floats:
    """Return METEOR 1.5 in [0, 1], (...), of summed ``meteor_counts`` (..., 23) (Denkowski and Lavie 2014, Sec. 2).

    The counts of one image give its segment score; their sum gives the corpus' METEOR, which is not the mean.
    """
    counts = np.asarray(counts, dtype=np.float64)
    words, function_words = counts[..., 0:2], counts[..., 2:4]  # (..., 2): caption, reference
    # (..., 4, 2, 2): kind of match; content or function words; caption or reference
    stages = counts[..., 4:20].reshape(*counts.shape[:-1], 4, 2, 2)
    chunks, matched = counts[..., 20], counts[..., 21:23]
    weighted = np.einsum("...ijk,i,j->...k", stages, _STAGES, np.array([_DELTA, 1 - _DELTA]))
    length = _DELTA * (words - function_words) + (1 - _DELTA) * function_words
    precision, recall = np.moveaxis(np.divide(weighted, length, out=np.zeros_like(length), where=length > 0), -1, 0)
    mean = _ALPHA * precision + (1 - _ALPHA) * recall
    mean = np.divide(precision * recall, mean, out=np.zeros_like(mean), where=mean > 0)
    matched = matched.mean(axis=-1)
    fragmentation = np.divide(chunks, matched, out=np.zeros_like(matched), where=matched > 0)
    return np.asarray(mean * (1 - _GAMMA * fragmentation**_BETA))


def spice(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return SPICE (Anderson et al. 2016) in [0, 1] of each image's caption, (images,); the corpus' SPICE is the mean.

    A caption without words scores 0 without being parsed.

    Raises:
        JavaError: SPICE is not available, fails, or takes too long.
        ValueError: The lists differ in length, or an image has no reference.
    """
    _check(hypotheses, references)
    if reason := missing_spice():
        raise JavaError(reason)
    images = []
    for number, (hypothesis, image_references) in enumerate(zip(hypotheses, references, strict=True)):
        texts = [text for text in map(_one_line, image_references) if text]
        if texts and _one_line(hypothesis):
            images.append({"image_id": number, "test": _one_line(hypothesis), "refs": texts})
    scores = np.zeros(len(hypotheses))
    if not images:
        return scores
    with tempfile.TemporaryDirectory(prefix="spice-") as folder:
        captions, result = Path(folder) / "captions.json", Path(folder) / "scores.json"
        captions.write_text(json.dumps(images), encoding="ascii")
        jar = _toolkit() / "spice" / "spice-1.0.jar"
        _run(
            ["-Xmx8G", "-jar", str(jar), str(captions), "-out", str(result), "-silent"],
            "SPICE",
            _START_SECONDS + _SPICE_SECONDS * len(images),
        )
        try:
            scored = json.loads(result.read_bytes())
            numbers = [image["image_id"] for image in scored]
            scores[numbers] = [float(image["scores"]["All"]["f"]) for image in scored]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise JavaError(f"SPICE's result cannot be read ({error!r})") from error
    if len(set(numbers)) != len(images):
        raise JavaError(f"SPICE scored {len(set(numbers))} of {len(images)} images")
    return scores


def _run(arguments: list[str], title: str, seconds: float, *, text: str = "") -> str:
    """Run Java and return its output. It is ended after so many seconds without output, and when Python is interrupted.

    What Java reads and writes are files, whose growth shows that it works.
    """
    # UTF-8 in any locale; otherwise Java would split a word at a letter beyond ASCII.
    command = ["java", "-Dfile.encoding=UTF-8", *arguments]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(text.encode(errors="replace"))  # half a surrogate pair cannot be encoded
        given.seek(0)
        try:
            process = subprocess.Popen(command, stdin=given, stdout=output, stderr=errors)
        except OSError as error:
            raise JavaError(f"{title}: java cannot be started ({error.strerror})") from error
        try:
            if not _ends(process, output.fileno(), seconds):
                raise JavaError(f"{title} gave no output for {seconds:.0f} s and was ended")
        finally:
            process.kill()
            process.wait()
        for file in (output, errors):
            file.seek(0)
        if process.returncode:
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise JavaError(f"{title} failed (exit code {process.returncode}): {lines[0][:200]}")
        return output.read().decode(errors="replace")


def _ends(process: subprocess.Popen[bytes], output: int, seconds: float) -> bool:
    """Wait for the end of a process; False if its output, a file's descriptor, has not grown for so many seconds."""
    before, size = -1, 0
    while process.returncode is None and size > before:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        before, size = size, os.fstat(output).st_size
    return process.returncode is not None


def _meteor_answer(line: str) -> list[float]:
    try:
        numbers = [float(number) for number in line.split()]
    except ValueError:
        numbers = []
    if len(numbers) != METEOR_COUNTS:
        raise JavaError(f"METEOR answered {line[:100]!r} where {METEOR_COUNTS} numbers were expected")
    return numbers


def _one_line(words: Words) -> str:
    """Join words without line breaks and METEOR's separator."""
    return " ".join(" ".join(words).replace("|||", " ").split())


def _check(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"as many hypotheses as reference lists are needed: {len(hypotheses)}, {len(references)}")
    for image, image_references in enumerate(references):
        if not image_references:
            raise ValueError(f"image {image} has no reference")


def _missing(*files: str) -> str | None:
    if os.environ.get("CAPTIONING_JAVA") == "off":
        return "CAPTIONING_JAVA=off"
    if shutil.which("java") is None:
        return "no Java runtime: no `java` on the PATH"
    try:
        missing = [name for name in files if not (_toolkit() / name).is_file()]
    except JavaError as error:
        return str(error)
    return f"pycocoevalcap lacks {missing[0]}" if missing else None


def _toolkit() -> Path:
    """Return the folder of pycocoevalcap."""
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise JavaError("pycocoevalcap is not installed: pip install -e '.[metrics]'")
    return Path(next(iter(spec.submodule_search_locations)))


def _java_version() -> int | None:
    return _version_of(shutil.which("java"))


@functools.cache
def _version_of(java: str | None) -> int | None:
    """Return 8 for "1.8.0_292" and 17 for "17.0.15"; None if this Java does not start."""
    if java is None:
        return None
    try:
        done = subprocess.run([java, "-version"], capture_output=True, timeout=_START_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr.decode(errors="replace"))
    return int(match[1]) if match else None
