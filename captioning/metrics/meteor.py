"""METEOR by the COCO toolkit's Java program, where Java and pycocoevalcap are installed.

The toolkit's class keeps a process waiting as long as Python runs, and mixes up the answers after a caption with a line
break. Each call here starts one process and sends all captions to it.
"""

import importlib.resources
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np

from captioning.errors import InputError
from captioning.metrics.arrays import Floats, ratio
from captioning.metrics.ngrams import Words

_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75  # METEOR 1.5's parameters for English, task "rank"
_MATCH_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])  # of exact matches, stems, synonyms and paraphrases


def meteor_counts(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return the counts that corpus METEOR sums over images. METEOR's separator ``|||`` is removed from words.

    Returns:
        (images, 23): words of the caption and of its best reference; function words of both; for each of the four kinds
        of matches, the content words and the function words of both; chunks; matched words of both.

    Raises:
        InputError: METEOR fails or is not available; ``CAPTIONING_JAVA=off`` in the environment turns it off.
        ValueError: The lists differ in length.
    """
    if os.environ.get("CAPTIONING_JAVA") == "off":
        raise InputError("no METEOR: CAPTIONING_JAVA=off")
    if shutil.which("java") is None:
        raise InputError("no METEOR: no `java` on the PATH")
    if importlib.util.find_spec("pycocoevalcap") is None:
        raise InputError("no METEOR: pycocoevalcap is not installed; pip install -e '.[metrics]'")
    lines = []
    for hypothesis, image_references in zip(hypotheses, references, strict=True):
        texts = (" ".join(words).replace("|||", " ") for words in (*image_references, hypothesis))
        lines.append(" ||| ".join(["SCORE", *(" ".join(text.split()) for text in texts)]) + "\n")
    jar = str(importlib.resources.files("pycocoevalcap") / "meteor" / "meteor-1.5.jar")
    # UTF-8 in any locale; otherwise Java would split a word at a letter beyond ASCII.
    command = ["java", "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar", jar, "-", "-", "-stdio", "-l", "en", "-norm"]
    process = subprocess.run(
        command, input="".join(lines), capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    try:
        counts = np.array([line.split() for line in process.stdout.splitlines()], np.float64).reshape(len(lines), 23)
    except ValueError:
        answer = (process.stderr.strip() or process.stdout.strip() or "no answer").splitlines()[0][:200]
        raise InputError(f"no METEOR: it failed (exit code {process.returncode}): {answer}") from None
    # METEOR does not count the single chunk of a caption whose words all match in a row.
    matches = counts[:, 4:20].reshape(-1, 8, 2).sum(axis=1)
    counts[(matches == counts[:, 0:2]).all(axis=1) & (counts[:, 20] == 1), 20] = 0
    return counts


def meteor_metric(counts: Floats) -> Floats:
    """Return METEOR 1.5 in percent, (.., 1), of summed ``meteor_counts`` (.., 23) (Denkowski and Lavie 2014, Sec. 2).

    The counts of one image give its segment score. Their sum gives the corpus' METEOR, not the mean segment score.
    """
    words, function_words = counts[..., 0:2], counts[..., 2:4]  # (.., 2): caption, reference
    # (.., 4, 2, 2): kind of match; content or function words; caption or reference
    matches = counts[..., 4:20].reshape(*counts.shape[:-1], 4, 2, 2)
    weighted_matches = np.einsum("...ijk,i,j->...k", matches, _MATCH_WEIGHTS, np.array([_DELTA, 1 - _DELTA]))
    length = _DELTA * (words - function_words) + (1 - _DELTA) * function_words
    precision, recall = np.moveaxis(ratio(weighted_matches, length), -1, 0)
    f_mean = ratio(precision * recall, _ALPHA * precision + (1 - _ALPHA) * recall)
    fragmentation = ratio(counts[..., 20], counts[..., 21:23].mean(axis=-1))
    return 100 * np.asarray(f_mean * (1 - _GAMMA * fragmentation**_BETA))[..., None]
