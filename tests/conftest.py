"""The environment of every test: a seed, one thread, no network, no display, no account."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Set before torch, matplotlib and wandb are imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["CAPTIONING_JAVA"] = "off"  # starting METEOR takes seconds; tests marked java turn it on
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["NO_COLOR"] = "1"
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # Lightning 2.6 calls what jsonargparse 4.5x deprecates

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from captioning.data.shapes import ShapesSource

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels then run on a CPU

gc.disable()  # until the tests are collected; pytest_collection_finish then exempts all imported objects

torch.set_num_threads(1)  # two test processes on two cores, not two times two threads
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores it

LOOPBACK = ("127.", "::1", "localhost")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = {
    "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
    "java": None if shutil.which("java") else "needs a Java runtime: no `java` on the PATH",
    "browser": None if CHROMIUM else "needs Chromium: no `chromium` on the PATH",
}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright; a test that uses it is marked ``browser``."""
    playwright = pytest.importorskip("playwright.sync_api")
    flags = (
        "--no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-quic"
    ).split()
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield started
        started.close()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise Triton reports leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, reason in MISSING.items():
        if reason and item.get_closest_marker(mark):
            pytest.skip(reason)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(number)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Seed fixtures that tests share by their name: they do not depend on the first test, and differ from its draws."""
    if fixturedef.scope != "function":
        _seed(zlib.crc32(fixturedef.argname.encode()))


@pytest.fixture(autouse=True)
def _alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed the test, and let it reach this machine alone: a download fails at once, with the name of the host."""
    _seed(0)
    if request.node.get_closest_marker("java"):
        monkeypatch.delenv("CAPTIONING_JAVA", raising=False)
    # A run without a folder must not be written into the checkout.
    monkeypatch.setenv("WANDB_DIR", str(tmp_path_factory.getbasetemp()))
    real_look_up, real_connect = socket.getaddrinfo, socket.socket.connect

    def look_up(host, *args, **kwargs):
        name = host.decode() if isinstance(host, bytes) else host
        if name and not name.startswith((*LOOPBACK, "0.0.0.0")) and name != socket.gethostname():
            raise OSError(f"tests have no network: look-up of {name}")
        return real_look_up(host, *args, **kwargs)

    def connect(self, address):
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            raise OSError(f"tests have no network: connection to {address[0]}")
        return real_connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(scope="module")
def shapes_settings(tmp_path_factory) -> tuple[ShapesSource, dict]:
    """A data set of a few images, and the settings of its source."""
    from captioning.data.shapes import ShapesSource

    root = str(tmp_path_factory.mktemp("data") / "shapes")
    arguments = {"root": root, "train": 1, "val": 1, "test": 4, "image_size": 48}
    source = ShapesSource(**arguments)
    source.prepare()
    return source, {"source": {"class_path": "captioning.data.shapes.ShapesSource", "init_args": arguments}}


@pytest.fixture
def tested_pair(tmp_path, shapes_settings) -> tuple[Path, Path]:
    """Two tested runs. The captions of "hard" are those of its checkpoint; those of "soft" are invented."""
    from helpers_runs import CSV, make_run, save_checkpoint

    from captioning.inference import load

    source, data = shapes_settings
    index = source.index("test")
    search = {"beam_size": 2, "max_length": 6, "length_normalization": 0.0, "min_length": 1, "context_mode": "expected"}
    hit = {
        "step": 0,
        "noun": "a",
        "chance": 0.2,
        **dict.fromkeys(("center_hit", "correctness", "uniform_correctness", "center_correctness"), 0.3),
    }
    folders = []
    for name, gated in (("soft", True), ("hard", False)):
        folder = make_run(tmp_path / "runs" / name, captions=[], settings={"data": data, "name": name}, csv=CSV)
        checkpoint = save_checkpoint(folder / "checkpoints/best.ckpt", gated=gated, search=search)
        made = load(checkpoint).caption([index.image_path(i) for i in range(len(index))], beam_size=2, max_length=6)
        captions = [
            {
                "image_id": int(index.image_ids[i]),
                "caption": made[i].text if name == "hard" else f"a shape number {i}",
                "file": str(index.image_path(i)),
                "references": index.references(i),
                "hits": [hit | {"hit": bool(i % 2)}],
            }
            for i in range(len(index))
        ]
        (folder / "test_captions.json").write_text(json.dumps(captions))
        (folder / "test_metrics.json").write_text(json.dumps({"test/bleu4": 1.0, "conditions": search}))
        folders.append(folder)
    return folders[0], folders[1]
