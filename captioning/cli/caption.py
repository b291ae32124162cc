"""The command ``caption``: captions of the user's images, printed, drawn, explored or written as JSON."""

import contextlib
import dataclasses
import itertools
import json as json_text
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from captioning.cli import model_name, print_written
from captioning.decoding_options import DecodingOptions
from captioning.errors import InputError, printable
from captioning.files import FIGURE_SUFFIXES, JSON_SUFFIXES, PAGE_SUFFIXES, check_output, write_text


def caption(
    *images: str,
    model: list[str] | None = None,
    overlay: Path | None = None,
    style: Literal["color", "paper"] = "color",
    details: bool = False,
    explorer: Path | None = None,
    json: Path | None = None,
    device: str = "auto",
    batch_size: int = 16,
    sample: bool = False,
    **decoding: Annotated[Any, DecodingOptions],
) -> None:
    """Caption images with the pretrained captioner or a model of your own, and draw where it looked.

    Options of the search default to those of the model's training.

    Args:
        *images: Image files, folders of images, or - to read paths from standard input.
        model: A FILE.ckpt, exported folder, hf:owner/name or pretrained (default); repeat it for an ensemble.
        overlay: Draw where the model looked: a png, pdf or svg file for one image, a folder of png files for several.
            With several models, each model has a row that shows where it looks at the same words.
        style: Style of overlays: the map in color or, as in the paper, in white on the gray image.
        details: Also draw the evidence on overlays: where each word came from. Also write the greatest attention of
            each word and its beta, the weight of the image.
        explorer: Write a page to explore attention and other captions, an HTML file.
        json: Also write words, attention and more, one JSON object a line; - prints them in place of captions.
        device: auto, cpu, cuda or cuda:N.
        batch_size: Images per batch.
        sample: Sample words instead of searching.
        **decoding: Options of the search, fields of ``DecodingOptions``.

    Examples:
        captioning caption photo.jpg --overlay photo.png
        captioning caption holiday/ --explorer holiday.html
        captioning caption holiday/ --model best.ckpt --overlay attention/ --json captions.jsonl
    """
    if overlay is None and (details or style != "color"):
        raise InputError("--style and --details: have no effect without --overlay")
    if sample and decoding.keys() & {"beam_size", "length_normalization"}:
        raise InputError("--beam_size and --length_normalization: have no effect with --sample")
    models = model or ["pretrained"]
    is_single = len(images) == 1 and images[0] != "-" and not os.path.isdir(images[0])
    failed_paths: list[Any] = []

    def skip(path: Any, error: object) -> None:
        failed_paths.append(path)
        print(f"error: {printable(error)}", file=sys.stderr)

    if not (paths := list(_paths(images))):
        raise InputError("name an image or a folder of images")
    inputs = [*paths, *models]
    check_output(json, "--json", JSON_SUFFIXES if is_single else (".jsonl",), inputs)
    check_output(explorer, "--explorer", PAGE_SUFFIXES, inputs)
    overlays = _overlay_paths(overlay, paths, is_single, inputs) if overlay is not None else {}
    from captioning.inference import load
    from captioning.views.explorer import ExplorerData, explorer_page

    captioner, names = load(models, device), list(map(model_name, models))
    options = dataclasses.replace(captioner.options, **decoding, method="sample" if sample else "beam")
    labels = names if len({*names}) == len(names) else models
    title = printable(" + ".join(names))
    explorer_images: list[ExplorerData] = []
    results = captioner.stream(paths, options, batch_size=batch_size, on_error=skip)
    first = list(itertools.islice(results, 1))  # if no image can be captioned, --json keeps its earlier content
    with _json_lines(json if first else None) as lines:
        for result in itertools.chain(first, results):
            content = result.to_dict() if lines is not None else {}
            if overlay is not None:
                content["overlay"] = str(overlays[str(result.path)])
                captioner.with_members(result, labels).save_figure(content["overlay"], style=style, details=details)
            if lines is not None:
                print(json_text.dumps(content), file=lines, flush=True)  # ASCII: a path need not be UTF-8
            if lines is not sys.stdout:
                path_column = [] if is_single else [printable(result.path)]
                for candidate in [result, *(result.alternatives if options.count else ())]:
                    print(*path_column, printable(candidate.text), sep="\t", flush=True)
            if explorer is not None:
                explorer_images.append(result.explorer_image(title))
    if explorer_images and explorer is not None:
        write_text(explorer, explorer_page(explorer_images, f"Where the model looked: {title}"), "--explorer")
    for output in (overlay, explorer, json):
        if output is not None and len(failed_paths) < len(paths) and str(output) != "-":
            print_written(output)
    if failed_paths:
        if not is_single:
            print(f"error: {len(failed_paths)} of {len(paths)} images unreadable", file=sys.stderr)
        raise SystemExit(2)


def _json_lines(path: Path | None) -> contextlib.AbstractContextManager[TextIO | None]:
    """Return standard output for -, or else the file at ``path``, which is replaced."""
    if path is None or str(path) == "-":
        return contextlib.nullcontext(sys.stdout if path else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8")


def _paths(images: Sequence[str]) -> Iterator[str]:
    """Yield the paths of files, of the images below folders in order, and from standard input for ``-``."""
    for name in images:
        if name == "-":
            lines = sys.stdin.buffer.read().replace(b"\0", b"\n").splitlines()  # find -print0 ends names with 0
            yield from (os.path.expanduser(os.fsdecode(line)) for line in lines if line.strip())
        else:
            yield from _images_below(name) if os.path.isdir(name) else [name]


def _images_below(folder: str) -> list[str]:
    """Return the images below a folder in order, and print how many other files there are.

    Hidden folders are left out. Links to folders count as other files. Raises InputError if there is no image.
    """
    from captioning.data.images import HEIC, suffixes

    readable = tuple(suffixes())
    images, other_files = list[str](), list[str]()
    for parent, folders, files in os.walk(folder, onerror=lambda error: other_files.append(str(error.filename))):
        folders[:] = [name for name in folders if name[0] != "."]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for path in (os.path.join(parent, name) for name in [*files, *links] if name[0] != "."):
            (images if path.lower().endswith(readable) else other_files).append(path)
    skipped = f"{len(other_files)} skipped: no image, or unreadable"
    if any(path.lower().endswith((".heic", ".heif")) for path in other_files):
        skipped += f" ({HEIC})"
    if not images:
        raise InputError(f"{folder}: no image in this folder" + (f", {skipped}" if other_files else ""))
    if other_files:
        print(f"{folder}: {skipped}", file=sys.stderr)
    return sorted(images)


def _overlay_paths(target: Path, paths: Sequence[str], is_single: bool, inputs: Sequence[str]) -> dict[str, Path]:
    """Return each image's overlay: ``target``, or a file in the folder ``target``."""
    if is_single and target.suffix and not target.is_dir():
        check_output(target, "--overlay", FIGURE_SUFFIXES, inputs)
        return dict.fromkeys(paths, target)
    if target.suffix.lower() in FIGURE_SUFFIXES and not target.is_dir():
        raise InputError(f"--overlay {target}: there may be several images; give a folder")
    check_output(target, "--overlay", inputs=inputs)
    if target.resolve() in {Path(path).resolve().parent for path in paths}:
        raise InputError(f"--overlay {target}: contains input images; give another folder")
    unique = dict.fromkeys(paths)  # numbered, because images in two folders may share a name
    return {path: target / f"{number:03d}_{Path(path).stem[:50]}.png" for number, path in enumerate(unique, 1)}
