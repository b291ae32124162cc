"""The command ``caption``: images of the user's, printed, drawn, explored or written as JSON."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json as json_text
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from captioning.cli import announce, check_output, print_written, suggest_path
from captioning.errors import InputError, printable
from captioning.files import FIGURES, JSON, PAGES, refuse_inputs, replacing, write_text
from captioning.run_folder import RunFolder


def caption(
    *images: str,
    model: list[str] | None = None,
    overlay: Path | None = None,
    style: Literal["color", "paper"] = "color",
    details: bool = False,
    heads: bool = False,
    explorer: Path | None = None,
    json: Path | None = None,
    beam_size: int | None = None,
    length_normalization: float | None = None,
    max_length: int | None = None,
    min_length: int | None = None,
    no_repeat_ngram: int | None = None,
    prefix: str | None = None,
    samples: int | None = None,
    inference: Literal["expected", "argmax", "sample"] | None = None,
    sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    device: str = "auto",
    batch_size: int = 16,
) -> None:
    """Caption images with the pretrained captioner or a model of your own, and draw where it looked.

    Options of the search that you leave out have the values of the model's training.

    Args:
        *images: Image files, folders of images, or - to read paths from standard input.
        model: A FILE.ckpt, exported folder, hf:owner/name or pretrained (default); repeat it for an ensemble.
        overlay: Draw where the model looked: a png, pdf or svg file for one image, a folder of png files for several.
            With several models, each has a row that shows where it looks at the same words.
        style: Style of overlays: the map in colours or, as in the paper, in white on the grey image.
        details: On overlays, also write each word's greatest attention and beta, how much the image weighs for it.
        heads: Also draw each head of multi-head attention on overlays.
        explorer: Write a page to explore attention and other captions, an HTML file.
        json: Also write words, attention and more, one JSON object a line; - prints them in place of captions.
        beam_size: Partial captions kept at each step; 1 is greedy search.
        length_normalization: Divide a caption's log-probability by its length to this power; 0 prefers short captions.
        max_length: Largest number of words.
        min_length: Smallest number of words.
        no_repeat_ngram: Allow no sequence of N words twice, and no word twice in a row.
        prefix: Begin every caption with this text, such as "a photo of".
        samples: Print the N best captions or, with --sample, N samples.
        inference: What hard attention looks at: the mean of all places, the most probable place, or a drawn one.
        sample: Draw words at random instead of searching.
        temperature: With --sample: below 1, probable words are drawn more often.
        top_k: With --sample: draw from the N most probable words.
        top_p: With --sample: draw from the most probable words that sum to this probability.
        seed: Seed of what is drawn; by default a new one.
        device: auto, cpu, cuda or cuda:N.
        batch_size: Images per batch.

    Examples:
        captioning caption photo.jpg --overlay photo.png
        captioning caption holiday/ --explorer holiday.html
        captioning caption holiday/ --model best.ckpt --overlay attention/ --json captions.jsonl
    """
    given = {**locals(), "method": "sample" if sample else None}  # the options by their names
    models = model or ["pretrained"]
    single = len(images) == 1 and images[0] != "-" and not os.path.isdir(images[0])
    unread: list[Any] = []

    def skip(path: Any, error: object) -> None:
        unread.append(path)
        print(f"error: {printable(error)}", file=sys.stderr)

    named = list(_paths(images))
    for path in named:
        if not os.path.exists(path):
            skip(path, f"{path}: no such image file{suggest_path(path)}")
    paths = [path for path in named if path not in unread]
    for option, output in (("--overlay", overlay), ("--json", json), ("--explorer", explorer)):
        refuse_inputs(output, [*paths, *models], option)
    check_output("--json", json, JSON)
    check_output("--explorer", explorer, PAGES)
    overlays = _overlay_paths(overlay, paths, single) if overlay is not None else {}
    if not paths:
        raise SystemExit(2)
    announce("caption")
    from captioning.inference import load, same_words
    from captioning.views.explorer import explorer_page, shown_image

    captioner = load(models, device)
    names = {field.name for field in dataclasses.fields(captioner.options)}
    decoding: dict[str, Any] = {name: value for name, value in given.items() if name in names and value is not None}
    options = dataclasses.replace(captioner.options, **decoding)
    runs = [run.path.resolve().name if (run := RunFolder.of(name)) else Path(name).stem for name in models]
    title = printable(" + ".join(runs))
    members = dict(zip(runs if len({*runs}) == len(runs) else models, captioner.members(), strict=True))

    explored = []
    with contextlib.ExitStack() as stack:
        lines = sys.stdout if str(json) == "-" else None
        if json is not None and lines is None:  # replaced only when it is complete
            part = stack.enter_context(replacing(json, "--json"))
            lines = stack.enter_context(part.open("w", encoding="utf-8"))
        for one in captioner.stream(paths, options, batch_size=batch_size, on_error=skip):
            content = one.to_dict()
            if overlay is not None:
                content["overlay"] = str(overlays[str(one.path)])
                drawn = one if len(models) == 1 else same_words(members, str(one.path), one.words)
                drawn.save_figure(overlays[str(one.path)], style, heads=heads, details=details)
            if lines is not None:
                print(json_text.dumps(content), file=lines, flush=True)
            if lines is not sys.stdout:
                for text in [one.text, *(other.text for other in one.alternatives if samples)]:
                    print(*([] if single else [printable(one.path)]), printable(text), sep="\t", flush=True)
            if explorer is not None:
                name = os.path.basename(printable(one.path))
                explored.append(shown_image(name, one.seen(), [one.for_explorer(title)]))
    if explorer is not None and explored:
        write_text(explorer, explorer_page(explored, f"Where {title} looks"), "--explorer")
    for output in (overlay, explorer, json):
        if output is not None and len(unread) < len(named) and str(output) != "-":
            print_written(output)
    if unread:
        if not single:
            print(f"error: {len(unread)} of {len(named)} images unreadable", file=sys.stderr)
        raise SystemExit(2)


def _paths(images: Sequence[str]) -> Iterator[str]:
    """Yield the named files, the images below named folders in order, and the paths of standard input for ``-``."""
    for name in images:
        if name == "-":
            lines = sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8).splitlines()
            yield from (os.path.expanduser(os.fsdecode(line)) for line in lines if line.strip())
        elif os.path.isdir(name):
            from captioning.data.images import HEIC, suffixes

            inside = [*_below(name)]
            counts, read = Counter(suffix for suffix, _ in inside), set(suffixes())
            others = {suffix: counts[suffix] for suffix in sorted(counts.keys() - read)}
            listing = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in others.items())
            listing += f" ({HEIC})" if {".heic", ".heif"} & others.keys() else ""
            if len(inside) == sum(others.values()):
                raise InputError(f"{name}: no image in this folder" + f", only {listing}" * bool(others))
            if others:
                print(f"{name}: left out what are no images: {printable(listing)}", file=sys.stderr)
            yield from sorted(path for suffix, path in inside if suffix in read)
        else:
            yield name


def _below(folder: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield suffix and path of the files below a folder; follow links, except links to a folder above."""
    from captioning.data.images import has_header

    above = (*above, os.path.realpath(folder))
    try:
        names = os.listdir(folder)
    except OSError as error:
        names = []
        yield f"folders ({error.strerror})", folder
    for path in (str(Path(folder, name)) for name in names):
        suffix = os.path.splitext(path)[1].lower()
        if os.path.isdir(path):
            yield from _below(path, above) if os.path.realpath(path) not in above else ()
        elif os.path.basename(path)[0] != ".":
            yield ".png" if not suffix and os.path.isfile(path) and has_header(Path(path)) else suffix, path


def _overlay_paths(target: Path, paths: Sequence[str], single: bool) -> dict[str, Path]:
    """Return each image's overlay: ``target``, or a file in the folder ``target``."""
    is_figure = target.suffix.lower() in FIGURES
    if (is_figure or target.is_file() or (single and target.suffix)) and not target.is_dir():
        if not single:
            raise InputError(f"--overlay {target}: there may be several images; give a folder")
        if not is_figure:
            raise InputError(f"--overlay {target}: must end in {', '.join(FIGURES)}, or be a folder")
        check_output("--overlay", target, FIGURES)
        return dict.fromkeys(paths, target)
    check_output("--overlay", target)
    counts: Counter[str] = Counter()
    folders = {Path(path).resolve().parent for path in paths}
    images: dict[str, tuple[str, Path]] = {}  # images and overlays, by lower-case name: some disks ignore case
    for path in dict.fromkeys(paths):
        stem = Path(path).stem
        overlay = target / f"{stem}.png"
        while str(overlay).lower() in images:  # images of two folders may have the same name
            counts[stem] += 1
            overlay = target / f"{stem}-{counts[stem] + 1}.png"
        if target.resolve() in folders and overlay.exists():
            raise InputError(f"--overlay {target}: would replace {overlay}; give another folder")
        images[str(overlay).lower()] = path, overlay
    return dict(images.values())
