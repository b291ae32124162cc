"""The command ``caption``: images of the user's, printed, drawn, explored or written as JSON."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json as json_text
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from typing_extensions import TypedDict, Unpack

from captioning.cli import announce, check_output, model_name, print_written, suggest_path
from captioning.errors import InputError, printable
from captioning.files import FIGURES, JSON, PAGES, refuse_inputs, replacing, write_text

if TYPE_CHECKING:
    from captioning.inference.caption import Caption


class Search(TypedDict, total=False):
    """The options of the command that are fields of ``captioning.decoding.DecodingOptions``."""

    beam_size: int
    length_normalization: float
    max_length: int
    min_length: int
    no_repeat_ngram: int
    prefix: str
    samples: int
    context_mode: Literal["expected", "argmax", "sample"]
    temperature: float
    top_k: int
    top_p: float
    seed: int


def caption(
    *images: str,
    model: list[str] | None = None,
    overlay: Path | None = None,
    style: Literal["color", "paper"] = "color",
    details: bool = False,
    heads: bool = False,
    explorer: Path | None = None,
    json: Path | None = None,
    sample: bool = False,
    device: str = "auto",
    batch_size: int = 16,
    **search: Unpack[Search],
) -> None:
    """Caption images with the pretrained captioner or a model of your own, and draw where it looked.

    Options of the search that you leave out have the values of the model's training.

    Args:
        *images: Image files, folders of images, or - to read paths from standard input.
        model: A FILE.ckpt, exported folder, hf:owner/name or pretrained (default); repeat it for an ensemble.
        overlay: Draw where the model looked: a png, pdf or svg file for one image, a folder of png files for several.
            With several models, each has a row that shows where it looks at the same words.
        style: Style of overlays: the map in color or, as in the paper, in white on the gray image.
        details: On overlays, also draw the evidence, where the word came from, and write each word's greatest attention
            and beta, how much the image weighs for it.
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
        context_mode: What hard attention looks at: the mean of all places, the most probable place, or a drawn one.
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
    models, single = model or ["pretrained"], len(images) == 1 and images[0] != "-" and not os.path.isdir(images[0])
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
    from captioning.inference import load
    from captioning.views.explorer import Shown, explorer_page

    captioner, names = load(models, device), list(map(model_name, models))
    given: dict[str, Any] = {**search, **({"method": "sample"} if sample else {})}
    options = dataclasses.replace(captioner.options, **given)
    title, shown = printable(" + ".join(names)), list[Shown]()
    sinks: list[Callable[[Any], object]] = []  # each takes one caption after the other
    with contextlib.ExitStack() as stack:
        if overlay is not None:
            labels = names if len({*names}) == len(names) else models
            draw: dict[str, Any] = {"style": style, "heads": heads, "details": details}
            sinks.append(lambda one: captioner.with_members(one, labels).save_figure(overlays[one.path], **draw))
        if json is not None:
            lines = sys.stdout
            if str(json) != "-":  # the file is replaced when it is complete
                part = stack.enter_context(replacing(json, "--json"))
                lines = stack.enter_context(part.open("w", encoding="utf-8"))
            sinks.append(lambda one: _print_json(one, overlays.get(one.path), lines))
        if str(json) != "-":
            sinks.append(lambda one: _print_text(one, with_path=not single, with_others="samples" in search))
        if explorer is not None:
            sinks.append(lambda one: shown.append(one.explored(title)))
        for result in captioner.stream(paths, options, batch_size=batch_size, on_error=skip):
            for sink in sinks:
                sink(result)
    if explorer is not None and shown:
        write_text(explorer, explorer_page(shown, f"Where the model looked: {title}"), "--explorer")
    for output in (overlay, explorer, json):
        if output is not None and len(unread) < len(named) and str(output) != "-":
            print_written(output)
    if unread:
        if not single:
            print(f"error: {len(unread)} of {len(named)} images unreadable", file=sys.stderr)
        raise SystemExit(2)


def _print_json(caption: Caption, overlay: Path | None, file: TextIO) -> None:
    content = caption.to_dict() | ({} if overlay is None else {"overlay": str(overlay)})
    print(json_text.dumps(content), file=file, flush=True)


def _print_text(caption: Caption, *, with_path: bool, with_others: bool) -> None:
    """Print a caption, and the other captions of its image if ``with_others``, a line each."""
    for one in [caption, *(caption.alternatives if with_others else ())]:
        print(*[printable(caption.path)] * with_path, printable(one.text), sep="\t", flush=True)


def _paths(images: Sequence[str]) -> Iterator[str]:
    """Yield the named files, the images below named folders in order, and the paths of standard input for ``-``."""
    for name in images:
        if name == "-":
            lines = sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8).splitlines()
            yield from (os.path.expanduser(os.fsdecode(line)) for line in lines if line.strip())
        else:
            yield from _images_below(name) if os.path.isdir(name) else [name]


def _images_below(folder: str) -> list[str]:
    """Return the images below a folder in order, and print what else is there; raise InputError without an image."""
    from captioning.data.images import HEIC, suffixes

    files, readable = list(_files_below(folder)), suffixes()
    others = Counter(suffix for suffix, _ in files if suffix not in readable)
    listing = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in sorted(others.items()))
    listing += f" ({HEIC})" if {".heic", ".heif"} & others.keys() else ""
    if len(files) == others.total():
        raise InputError(f"{folder}: no image in this folder" + f", only {listing}" * bool(others))
    if others:
        print(f"{folder}: left out what are no images: {printable(listing)}", file=sys.stderr)
    return sorted(path for suffix, path in files if suffix in readable)


def _files_below(folder: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield suffix and path of the files below a folder; follow links, except links to a folder above.

    A file without a suffix that begins as an image does has the suffix .png.
    """
    from captioning.data.images import has_header

    above = (*above, os.path.realpath(folder))
    try:
        names = os.listdir(folder)
    except OSError as error:
        yield f"folders ({error.strerror})", folder
        return
    for path in (Path(folder, name) for name in names):
        if path.is_dir():
            yield from _files_below(str(path), above) if os.path.realpath(path) not in above else ()
        elif path.name[0] != ".":
            is_image = not path.suffix and path.is_file() and has_header(path)
            yield ".png" if is_image else path.suffix.lower(), str(path)


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
    folders, overlays = {Path(path).resolve().parent for path in paths}, dict[str, Path]()
    counts, taken = Counter[str](), set[str]()  # in lower case, because some disks ignore case
    for path in dict.fromkeys(paths):
        stem = name = Path(path).stem
        while name.lower() in taken:  # images of two folders may have the same name
            counts[stem] += 1
            name = f"{stem}-{counts[stem] + 1}"
        taken.add(name.lower())
        overlays[path] = target / f"{name}.png"
        if target.resolve() in folders and overlays[path].exists():
            raise InputError(f"--overlay {target}: would replace {overlays[path]}; give another folder")
    return overlays
