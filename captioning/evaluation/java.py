"""METEOR: the COCO toolkit's Java program, where Java and pycocoevalcap are installed.

``CAPTIONING_JAVA=off`` in the environment leaves it out.

The toolkit's own class is not used: it keeps a process waiting as long as Python runs, and mixes up the answers after a
caption with a line break. Each call here starts one process and sends it all captions.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from captioning.evaluation.ngrams import Words
from captioning.evaluation.resampling import Floats

METEOR_COUNTS = 23
_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75  # METEOR 1.5's parameters for English, task "rank"
_STAGES = np.array([1.0, 0.6, 0.8, 0.6])  # weights of exact matches, stems, synonyms and paraphrases
_SECONDS = 3600  # METEOR needs 4 s to start, and some milliseconds for each image


class JavaError(RuntimeError):
    """METEOR failed. The message is one line."""


def missing_meteor() -> str | None:
    """Return why METEOR cannot be computed, in one line, or None."""
    if os.environ.get("CAPTIONING_JAVA") == "off":
        return "CAPTIONING_JAVA=off"
    if shutil.which("java") is None:
        return "no Java runtime: no `java` on the PATH"
    if importlib.util.find_spec("pycocoevalcap") is None:
        return "pycocoevalcap is not installed: pip install -e '.[metrics]'"
    return None


def meteor_counts(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return the counts that corpus METEOR sums over images. METEOR's separator ``|||`` is removed from words.

    Returns:
        (images, 23): words of the caption and of its best reference; function words of both; for the four kinds of
        matches, the content words and the function words of both; chunks; matched words of both.

    Raises:
        JavaError: METEOR is not available, fails, or takes too long.
        ValueError: The lists differ in length.
    """
    if reason := missing_meteor():
        raise JavaError(reason)
    lines = [
        " ||| ".join(["SCORE", *map(_one_line, of_image), _one_line(hypothesis)]) + "\n"
        for hypothesis, of_image in zip(hypotheses, references, strict=True)
    ]
    answers = _run("".join(lines)).splitlines()
    try:
        counts = np.array([answer.split() for answer in answers], dtype=np.float64).reshape(len(lines), METEOR_COUNTS)
    except ValueError:
        raise JavaError(f"METEOR answered {' '.join(answers)[:100]!r} for {len(lines)} images") from None
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


def _run(text: str) -> str:
    spec = importlib.util.find_spec("pycocoevalcap")
    assert spec is not None and spec.submodule_search_locations is not None
    jar = Path(next(iter(spec.submodule_search_locations)), "meteor", "meteor-1.5.jar")
    # UTF-8 in any locale; otherwise Java would split a word at a letter beyond ASCII.
    command = ["java", "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    try:
        done = subprocess.run(
            command, input=text.encode(errors="replace"), capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"METEOR: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise JavaError(f"METEOR failed (exit code {done.returncode}): {lines[0][:200]}")
    return done.stdout.decode(errors="replace")


def _one_line(words: Words) -> str:
    """Join words without line breaks and METEOR's separator."""
    return " ".join(" ".join(words).replace("|||", " ").split())
