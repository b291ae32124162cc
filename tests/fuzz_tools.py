"""The subcommands beside the LightningCLI's, which the fuzzer runs at work with damaged files and options."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import random
import socket
import ssl
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from fuzz_targets import SAID, Target, as_json, contents, inside, make_used, trained
from helpers import SCRIPTS, random_view
from helpers_fuzz import ODD
from safetensors.torch import save_file

from captioning.cli import evaluate, export, extract, prepare
from captioning.data import download
from captioning.encoders import TorchvisionEncoder

WORDS = [(value if isinstance(value, str) else json.dumps(value)).replace("\0", "") for value in ODD]


def changed(line: list[str], draw: random.Random) -> list[str]:
    """Return a command line with up to two words replaced, left out or said twice."""
    line = list(line)
    for _ in range(draw.choice((0, 1, 1, 2))):
        at = draw.randrange(max(1, len(line)))
        line[at : at + 1] = draw.choice(([draw.choice(WORDS)], [], line[at : at + 1] * 2, [draw.choice(WORDS)[:9]]))
    return line


# Tools that use a trained model or the results of runs

LINES = {
    "caption": ["a.png", "--model", "x.ckpt", "--max_length", "3", "--device", "cpu"],
    "average": ["--model", "x.ckpt", "--model", "x.ckpt", "--fractions", "1", "2", "--output", "y.ckpt"],
    "export": ["--model", "x.ckpt", "--output", "e", "--dtype", "float32", "--license", "mit", "--notes", "n.md"],
    "study": ["study.yaml", "--only", "soft", "--seeds", "1", "--dry_run", "--runs", "r", "--measurements", "m"],
    "completion": ["bash"],
    "compare": ["r", "q", "--resamples", "9", "--images", "1", "--seed", "3"],
    "app": ["--model", "x.ckpt", "--host", "127.0.0.1", "--port", "7860"],
    "bench": ["--only", "train", "alone", "--rounds", "2", "--json", "b.json", "--device", "cpu", "--quick"],
}
VARIANTS = {"soft": {"config": "shapes_soft"}}
STUDY = {"name": "x", "seeds": [1, 2], "variants": VARIANTS, "fit": [], "references": ["soft"]}


def tools(made: Path) -> Target:
    """Tools that use a trained model or the results of runs; none serves a page or measures anything."""
    make_used(made)
    for name, content in {"study.yaml": as_json(STUDY), "n.md": b"## Notes\n"}.items():
        (made / name).write_bytes(content)
    files = contents(made)
    mains = {tool: importlib.import_module(f"captioning.cli.{tool}").main for tool in LINES}

    def run(folder: Path, draw: random.Random) -> None:
        tool = draw.choice(list(LINES))
        with page_of_one_photograph("a.png"), no_measurements(), mock.patch("captioning.cli.study.train"):
            mains[tool](changed(LINES[tool], draw))

    return Target(files, list(files), run, 2.5, leaves_traces=True)


@contextlib.contextmanager
def page_of_one_photograph(name: str) -> Iterator[None]:
    """Replace gradio by a page that is given one photograph and served nowhere."""
    gradio = mock.MagicMock(__spec__=ModuleSpec("gradio", None))
    gradio.File.return_value.change = lambda answer, *_, **__: answer(name)
    with mock.patch.dict(sys.modules, gradio=gradio), mock.patch("socket.getaddrinfo", numeric_address):
        yield


def numeric_address(host: Any, port: Any, *, getaddrinfo: Callable[..., Any] = socket.getaddrinfo, **_: Any) -> Any:
    """``socket.getaddrinfo`` that asks no server for a name."""
    return getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


@contextlib.contextmanager
def no_measurements() -> Iterator[None]:
    """Replace the measurements of `captioning bench` by an invented one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "path", [str(SCRIPTS.parent), *sys.path]))
        report, timing = (importlib.import_module(f"benchmarks.{name}") for name in ("report", "timing"))
        invented = report.Report([report.Row("x", "tiny", timing.Timing((0.1, 0.2)), items=3)])
        stack.enter_context(mock.patch("benchmarks.agreement.check"))
        for subject in ("training.measure", "decoding.measure_alone", "decoding.measure"):
            stack.enter_context(mock.patch(f"benchmarks.{subject}", return_value=invented))
        yield


CHECKPOINT = ["--model", "runs/tiny/checkpoints/last.ckpt"]
SCORINGS = (
    ["evaluate", *CHECKPOINT, "--split", "test", "--beam_size", "2", "--device", "cpu", "--json", "o.json"],
    ["evaluate", *CHECKPOINT, *CHECKPOINT, "--data", "tiny.yaml", "--data.eval_batch_size", "1"],
    ["export", *CHECKPOINT, "--output", "e", "--calibrate"],
)


def scoring(made: Path) -> Target:
    """`captioning evaluate` of models, and `captioning export --calibrate`, which caption the data of a run."""
    files = trained(made, val=40)  # fewer are too few to calibrate on
    mains = {"evaluate": evaluate.main, "export": export.main}

    def run(folder: Path, draw: random.Random) -> None:
        tool, *line = draw.choice(SCORINGS)
        mains[tool](changed(line, draw))

    return Target(files, [name for name in files if "metrics" not in name], run, 0.5, leaves_traces=True)


# Tools that make data

FLICKR = {
    "images": [
        {"filename": f"{n}.jpg", "imgid": n, "split": split, "sentences": [{"tokens": SAID[n].split()}]}
        for n, split in enumerate(("train", "val", "test"))
    ]
}
COCO = {
    "images": [{"id": 1, "file_name": "1.jpg", "height": 14, "width": 20}],
    "annotations": [{"id": 1, "image_id": 1, "caption": SAID[0]}],
}
SOURCE = {"class_path": "FolderSource", "init_args": {"root": ".", "captions": "a.jsonl"}}
PREPARATIONS = (
    ["coco", "--root", "coco", "--mirror", "http://x", "--year", "2017"],
    ["flickr8k", "--root", "flickr8k", "--mirror", "http://x/y"],
    ["flickr30k", "--root", "flickr30k"],
    ["shapes", "--root", "s", "--train", "2", "--val", "1", "--test", "1", "--seed", "3"],
    ["frequencies", "--config", "c.yaml", "--output", "n.json", "--split", "train", "--data.source.root", "."],
)


def preparation(made: Path) -> Target:
    """`captioning prepare`, with damaged archives from a server or put there by hand."""
    made.mkdir(parents=True, exist_ok=True)
    random_view(20, 14).save(photograph := io.BytesIO(), "JPEG")
    photographs = {f"{n}.jpg": photograph.getvalue() for n in range(3)}
    rows = [{"image": f"{n}.png", "caption": SAID[n], "split": ("train", "val")[n % 2]} for n in range(3)]
    kinds = [f"annotations/{kind}_{split}2017.json" for kind in ("captions", "instances") for split in ("train", "val")]
    files = {
        "server/caption_datasets.zip": zipped(
            {f"dataset_{name}.json": as_json(FLICKR) for name in ("flickr8k", "flickr30k")}
        ),
        "server/annotations_trainval2017.zip": zipped(dict.fromkeys(kinds, as_json(COCO))),
        "server/train2017.zip": zipped({"train2017/1.jpg": photograph.getvalue()}),
        "server/val2017.zip": zipped({"val2017/1.jpg": photograph.getvalue()}),
        "flickr8k/Flickr8k_Dataset.zip": zipped({f"Flicker8k_Dataset/{name}": x for name, x in photographs.items()}),
        "flickr30k/flickr30k-images.tar": tarred(photographs),
        "a.jsonl": b"".join(as_json(row) + b"\n" for row in rows),
        "c.yaml": yaml.safe_dump({"data": {"source": SOURCE}}).encode(),
    }
    archives = {
        key: dataclasses.replace(archive, size=None, md5=None, images=min(archive.images, 1))
        for key, archive in prepare.COCO.items()
    }

    def run(folder: Path, draw: random.Random) -> None:
        with server(folder / "server", draw), mock.patch.object(prepare, "COCO", archives):
            prepare.main(changed(draw.choice(PREPARATIONS), draw))

    return Target(files, list(files), run, 4.0, leaves_traces=True)


EXTRACTIONS = (
    ["--config", "c.yaml", "--output", "f", "--batch_size", "2", "--num_workers", "0", "--device", "cpu", "--flipped"],
    ["--config", "c.yaml", "--output", "o", "--split", "train", "val", "--shard", "0/2", "--num_workers", "1"],
    ["--output", "f", "--verify"],
)


def extraction(made: Path) -> Target:
    """`captioning extract`, with damaged images, weights, settings and features that are there."""
    made.mkdir(parents=True, exist_ok=True)
    encoder = {"name": "squeezenet1_1", "node": "features.1", "weights": "w.safetensors", "image_size": 16}
    network = TorchvisionEncoder(**{**encoder, "weights": None}).network
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, made / "w.safetensors")
    rows = [{"image": f"{n}.png", "caption": SAID[n], "split": split} for n, split in enumerate(("train", "val"))]
    for row in rows:
        random_view(20, 14).save(made / row["image"])
    (made / "a.jsonl").write_bytes(b"".join(as_json(row) + b"\n" for row in rows))
    settings = {"class_path": "TorchvisionEncoder", "init_args": encoder}
    (made / "c.yaml").write_text(yaml.safe_dump({"data": {"source": SOURCE}, "model": {"encoder": settings}}))
    with inside(made):
        extract.main(EXTRACTIONS[0])
    files = contents(made)

    def run(folder: Path, draw: random.Random) -> None:
        with server(folder / "server", draw):
            extract.main(changed(draw.choice(EXTRACTIONS), draw))

    return Target(files, list(files), run, 2.5, leaves_traces=True)


def zipped(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in members.items():
            file.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def tarred(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return out.getvalue()


@contextlib.contextmanager
def server(folder: Path, draw: random.Random) -> Iterator[None]:
    """Let every address lead to one server, which has the files of a folder and sometimes answers otherwise."""

    def connect(*_: Any, **__: Any) -> Any:
        asked: list[bytes] = []
        return SimpleNamespace(
            setsockopt=lambda *_: None,
            sendall=asked.append,
            makefile=lambda *_: io.BytesIO(answer(folder, b"".join(asked), draw)),
            close=lambda: None,
        )

    with (
        mock.patch("socket.create_connection", connect),
        mock.patch.object(ssl.SSLContext, "wrap_socket", lambda self, connection, **_: connection),
        mock.patch.dict(os.environ, no_proxy="*"),
        mock.patch.object(download, "PAUSE", 0.0),
    ):
        yield


STATUSES = ("206 Partial Content", "302 Found", "404 Not Found", "416 Range Not Satisfiable", "503 Busy", "x", "")
HEADERS = ("Content-Length", "Content-Range", "Location", "Transfer-Encoding", "x")


def answer(folder: Path, request: bytes, draw: random.Random) -> bytes:
    """Return the server's answer to an HTTP request."""
    name = request.split(b" ")[1].rpartition(b"/")[2].decode("latin-1")
    if not (folder / name).is_file():
        return b"HTTP/1.1 404 Not Found\r\n\r\n"
    body = (folder / name).read_bytes()
    status, headers = damaged_head(len(body), draw)
    lines = [f"HTTP/1.1 {status}", *(f"{key}: {value}" for key, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def damaged_head(size: int, draw: random.Random) -> tuple[str, dict[str, str]]:
    """Return the status and the headers of an answer of so many bytes, which now and then are others."""
    status, headers = "200 OK", {"Content-Length": str(size)}
    if draw.random() < 0.1:
        status = draw.choice(STATUSES)
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        headers[draw.choice(HEADERS)] = draw.choice((*WORDS, f"bytes 0-{size - 1}/{size}"))
    return status, headers


TOOLS: tuple[Callable[[Path], Target], ...] = (tools, scoring, preparation, extraction)
