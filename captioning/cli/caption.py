"""Caption images with the pretrained captioner or a model of your own, and draw where it looked.

examples:
  captioning caption photo.jpg --overlay photo.png
  captioning caption holiday/ --model best.ckpt --overlay attention/ --json captions.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from captioning.cli.arguments import (
    add_batch_size_option,
    add_device_option,
    add_import_option,
    add_inference_option,
    add_json_option,
    add_model_option,
    add_search_options,
    device_name,
    script_parser,
    whole_number,
)
from captioning.cli.outputs import STDOUT, OutputFile
from captioning.cli.usage import announce_import, check_named
from captioning.errors import InputError, exits_on_input_error, printable
from captioning.files import refuse_inputs, replacing, write_text
from captioning.progress import Progress
from captioning.run_folder import RunFolder

if TYPE_CHECKING:
    from captioning.inference import DecodingOptions, ImageCaptioner
    from captioning.inference.caption import Caption

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

_MOST_OTHERS = 100_000  # by how many other files and folders may outnumber the images
_QUIET = 2.0  # seconds that a folder is listed without a word

_FIGURES = (".png", ".pdf", ".svg")


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    single = len(arguments.images) == 1 and arguments.images[0] != "-" and not Path(arguments.images[0]).is_dir()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # file names need not be valid text
    if arguments.explorer is not None and arguments.explorer.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--explorer {arguments.explorer}: must end in .html")
    overlay = _overlay_namer(arguments, single)
    check_named(arguments.models, arguments.imports)
    paths: Iterable[str] = _paths(arguments.images)  # lists folders, which may take a while: after the checks above
    if arguments.overlay is not None or "-" not in arguments.images:
        paths = list(paths)  # so that all are known before the first overlay is drawn
    unreadable: list[str] = []
    if isinstance(paths, list):
        unreadable = [path for path in paths if not os.path.exists(path)]
        paths = [path for path in paths if os.path.exists(path)]
    _keep_inputs(arguments, paths if isinstance(paths, list) else [])
    for path in unreadable:
        print(f"error: {printable(path)}: no such image file", file=sys.stderr)
    if unreadable and not paths:
        _end(unreadable=len(unreadable), undrawn=0, images=len(unreadable), single=single)
    announce_import("caption")

    from captioning.component import import_modules  # imports torch, which takes seconds: after the checks above
    from captioning.inference import load

    import_modules(arguments.imports, [Path()])
    captioner = load(arguments.models, device_name(arguments.device))
    options = _options(arguments, captioner)
    undrawn = 0
    explored: list[Caption] = []

    def skip(path: Any, error: InputError) -> None:
        unreadable.append(path)
        progress.say(f"error: {error}")

    captions = captioner.stream(paths, options, batch_size=arguments.batch_size, on_error=skip)
    quiet = arguments.json == STDOUT
    writes = not quiet and any((arguments.json, arguments.overlay, arguments.explorer))
    shown = sys.stderr.isatty() and not sys.stdout.isatty()  # captions on the terminal show it themselves
    with (
        Progress("captions", stream=sys.stderr, shown=shown) as progress,
        _json_file(arguments.json) as json_file,
        _until_the_reader_leaves(),
    ):
        for caption in captions:
            if not isinstance(paths, list):
                _keep_inputs(arguments, [str(caption.path)])
            extra = {}
            if overlay is not None:
                try:
                    target = str(overlay(caption))
                    style: Literal["color", "paper"] = arguments.style or "color"
                    caption.save_figure(target, style, heads=arguments.heads, details=arguments.details)
                    extra["overlay"] = target
                except InputError as error:
                    undrawn += 1
                    progress.say(f"error: {error}")
            if not quiet:
                with _until_the_reader_leaves() if writes else nullcontext():  # files are written to their end
                    _print_captions(caption, arguments, single)
            if json_file is not None:
                print(json.dumps(caption.to_dict() | extra), file=json_file, flush=True)
            if arguments.explorer is not None:
                explored.append(caption)
            progress.update(progress.done + 1)
    if explored:
        _write_explorer(arguments.explorer, explored, arguments.models)
    images = len(unreadable) + progress.done
    _end(unreadable=len(unreadable), undrawn=undrawn, images=images, single=single)


def _end(*, unreadable: int, undrawn: int, images: int, single: bool) -> None:
    """Say how many of several images failed; exit code 2 if one did."""
    for count, fate in ((unreadable, "images unreadable"), (undrawn, "overlays not written")):
        if count and not single:
            print(f"error: {count} of {images} {fate}", file=sys.stderr)
    if unreadable or undrawn:
        raise SystemExit(2)


def _print_captions(caption: Caption, arguments: argparse.Namespace, single: bool) -> None:
    """Print a line for the caption, or for each of --samples."""
    captions = [caption, *caption.alternatives] if arguments.samples else [caption]
    for one in captions:
        columns = [] if single else [printable(caption.path)]
        columns.append(printable(one.text))
        print("\t".join(columns), flush=True)


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "caption")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="an image file, a folder of images, or - to read paths from stdin"
    )
    add_model_option(parser, several="an ensemble", required=False)
    add_json_option(parser, "words, alphas and more")
    add_device_option(parser)
    add_batch_size_option(parser, 16)
    add_import_option(parser)
    _add_pictures(parser)
    _add_decoding(parser.add_argument_group("decoding (defaults: those of the validations in training)"))
    return parser


def _add_pictures(pictures: argparse.ArgumentParser) -> None:
    pictures.add_argument(
        "--overlay",
        type=OutputFile(""),
        metavar="PATH",
        help="draw where the model looked: a png, pdf or svg file, or a folder",
    )
    pictures.add_argument(
        "--overlay_format",
        choices=("png", "pdf", "svg"),
        metavar="EXT",
        help="format of overlays in a folder: png (default), pdf or svg",
    )
    pictures.add_argument(
        "--style",
        choices=("color", "paper"),
        metavar="NAME",
        help="style of overlays: color (default), or paper without colours",
    )
    pictures.add_argument("--details", action="store_true", help="write beta and each map's maximum on overlays")
    pictures.add_argument(
        "--heads", action="store_true", help="also draw each head of multi-head attention on overlays"
    )
    pictures.add_argument(
        "--explorer",
        type=OutputFile("HTML"),
        metavar="FILE.html",
        help="write a page to explore attention and other captions",
    )


def _add_decoding(decoding: argparse._ArgumentGroup) -> None:
    """Add the options that are fields of ``DecodingOptions``, and --sample."""
    add_search_options(decoding)
    decoding.add_argument(
        "--no_repeat_ngram", type=whole_number(1), metavar="N", help="allow no sequence of N words twice"
    )
    decoding.add_argument("--prefix", metavar="TEXT", help='begin every caption with this text, such as "a photo of"')
    decoding.add_argument(
        "--samples", type=whole_number(1), metavar="N", help="print the N best captions or, with --sample, N samples"
    )
    decoding.add_argument(
        "--diverse",
        type=whole_number(1),
        metavar="GROUPS",
        help="divide the beam into groups that avoid each other's words",
    )
    decoding.add_argument(
        "--diversity", type=float, metavar="NATS", help="how strongly the groups do so (default: 0.5)"
    )
    add_inference_option(decoding)
    decoding.add_argument("--sample", action="store_true", help="draw words at random instead of searching")
    decoding.add_argument(
        "--temperature", type=float, metavar="T", help="with --sample: below 1, probable words are drawn more often"
    )
    decoding.add_argument(
        "--top_k", type=whole_number(1), metavar="K", help="with --sample: draw from the K most probable words"
    )
    decoding.add_argument(
        "--top_p", type=float, metavar="P", help="with --sample: draw from the most probable words that sum to P"
    )
    decoding.add_argument("--seed", type=int, metavar="N", help="seed of what is drawn (default: a new one)")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = parser().parse_args(argv)
    arguments.models = arguments.models or ["pretrained"]
    given = [f"--{name}" for name in ("temperature", "top_k", "top_p", "seed") if getattr(arguments, name) is not None]
    if given and not arguments.sample and not (given == ["--seed"] and arguments.inference == "sample"):
        raise InputError(f"{given[0]} has an effect only with --sample")
    for name in ("beam_size", "length_normalization", "diverse", "diversity"):
        if arguments.sample and getattr(arguments, name) is not None:
            raise InputError(f"--{name} has no effect with --sample")
    for name, where in (
        ("style", "--overlay"),
        ("heads", "--overlay"),
        ("details", "--overlay"),
        ("overlay_format", "--overlay FOLDER"),
    ):
        if getattr(arguments, name) and not arguments.overlay:
            raise InputError(f"--{name} has an effect only with {where}")
    return arguments


def _keep_inputs(arguments: argparse.Namespace, paths: list[str]) -> None:
    """Refuse an output that would replace an image, a checkpoint, or a file beside an image.

    Args:
        arguments: The command line.
        paths: The images that are known.

    Raises:
        InputError: An output is one of the inputs.
    """
    inputs = [*paths, *arguments.models]
    for option in ("overlay", "json", "explorer"):
        target = getattr(arguments, option)
        if target is not None and target != STDOUT:
            refuse_inputs(target, inputs, f"--{option}")
    if arguments.overlay is not None and arguments.overlay.is_dir():
        suffix, folder = "." + (arguments.overlay_format or "png"), arguments.overlay.resolve()
        for path in map(Path, inputs):
            target = folder / (path.stem + suffix)
            if folder in (path.parent.resolve(), path.resolve().parent) and target.exists():
                raise InputError(f"--overlay {arguments.overlay}: would replace {target}; give another folder")


def _paths(images: list[str]) -> Iterator[str]:
    """Return the files as named, the images of folders in the order of their names, and the lines of standard input.

    Raises:
        InputError: A folder has no image, or too many other files.
    """
    folders = {name: _inside(name) for name in images if name != "-" and Path(name).is_dir()}

    def one_by_one() -> Iterator[str]:
        for name in images:
            if name == "-":
                yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
            else:
                yield from folders.get(name, [name])

    return one_by_one()


def _inside(folder: str) -> list[str]:
    """Return the images below a folder, in the order of their names.

    Raises:
        InputError: The folder has no image, or too many other files.
    """
    images: list[str] = []
    others, announce_at = 0, time.monotonic() + _QUIET
    for place, folders, names in os.walk(folder):
        inside = [name for name in names if _is_image(name)]
        images += [os.path.join(place, name) for name in inside]
        others += len(folders) + len(names) - len(inside)
        if others > _MOST_OTHERS + len(images):
            raise InputError(
                f"{folder}: more than {_MOST_OTHERS:,} other files and folders beside its images; name the "
                "folders of the images, or send their paths to standard input and give -"
            )
        if time.monotonic() > announce_at:
            announce_at = math.inf
            print(f"captioning caption: looking for images in {printable(folder)} ...", file=sys.stderr, flush=True)
    if not images:
        raise InputError(f"{folder}: no image in this folder; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
    return sorted(images)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")


def _overlay_namer(arguments: argparse.Namespace, single: bool) -> Callable[[Caption], Path] | None:
    """Return a function that names an image's overlay; None without --overlay."""
    if arguments.overlay is None:
        return None
    target = arguments.overlay
    if target.suffix and not target.is_dir():
        if not single:
            raise InputError(f"--overlay {target}: there may be several images; give a folder")
        if arguments.overlay_format:
            raise InputError(f"--overlay_format: {target} is a file and its suffix says the format")
        if target.suffix.lower() not in _FIGURES:
            raise InputError(f"--overlay {target}: must end in {', '.join(_FIGURES)}, or be a folder")
        return lambda caption: target
    if target.exists() and not target.is_dir():
        raise InputError(f"--overlay {target}: is a file without .png, .pdf or .svg; give such a name, or a folder")
    suffix = "." + (arguments.overlay_format or "png")
    taken: set[str] = set()

    def name(caption: Caption) -> Path:
        stem = Path(str(caption.path)).stem
        unique, number = stem, 1
        while unique in taken:  # images of the same name from several folders
            number += 1
            unique = f"{stem}-{number}"
        taken.add(unique)
        return target / (unique + suffix)

    return name


def _write_explorer(path: Path, captions: list[Caption], checkpoints: list[str]) -> None:
    from captioning.views.explorer import ExploredImage, explorer_page

    folders = [(checkpoint, RunFolder.of(checkpoint)) for checkpoint in checkpoints]
    run = " + ".join(folder.path.resolve().name if folder else Path(file).stem for file, folder in folders)
    images = [
        ExploredImage(view=caption.view, name=Path(str(caption.path)).name, runs=[caption.for_explorer(run)])
        for caption in captions
    ]
    page = explorer_page(images, f"Where {run} looks")
    write_text(path, page.encode("utf-8", errors="replace").decode(), "--explorer")  # file names need not be valid text


def _options(arguments: argparse.Namespace, captioner: ImageCaptioner[Any]) -> DecodingOptions:
    names = [field.name for field in dataclasses.fields(captioner.options) if hasattr(arguments, field.name)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return dataclasses.replace(captioner.options, method="sample" if arguments.sample else "beam", **given)


@contextmanager
def _json_file(target: Path | None) -> Iterator[TextIO | None]:
    """Yield the file that --json names, if any. It gets its name when it is complete."""
    if target is None or target == STDOUT:
        yield None if target is None else sys.stdout
        return
    with replacing(target, "--json") as part, part.open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def _until_the_reader_leaves() -> Iterator[None]:
    """End quietly when the output is closed, as by ``| head``."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
