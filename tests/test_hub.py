"""Captioners by name from the hub: a local server speaks the part of its protocol that downloads need."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import save_image
from helpers_runs import save_checkpoint

from captioning.errors import InputError
from captioning.inference import load

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the hub extra")

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """Repositories as folders: ``ROOT/owner/name/COMMIT/file``."""

    root: Path
    asked: list[str]

    def do_HEAD(self):
        self._answer(with_content=False)

    def do_GET(self):
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        owner, name, _, revision, file = self.path.split("?")[0].lstrip("/").split("/", 4)
        repository, commit = self.root / owner / name, COMMITS.get(revision, revision)
        path = repository / commit / file
        places = {repository: "RepoNotFound", path.parent: "RevisionNotFound", path: "EntryNotFound"}
        missing = next((error for place, error in places.items() if not place.exists()), None)
        content = b"" if missing else path.read_bytes()
        self.asked.append(f"{self.command} {file}")
        self.send_response(404 if missing else 200)
        headers = {"X-Error-Code": missing} if missing else {}
        headers |= {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        for header, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(header, value)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one captioner, owner/mine, and what it was asked for. Its client keeps a cache of its own."""
    handler = type("Handler", (Hub,), {"root": tmp_path / "hub", "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    load(save_checkpoint(tmp_path / "best.ckpt")).export(handler.root / "owner/mine" / COMMITS["main"], "# card\n")
    (handler.root / "owner/mine" / COMMITS["main"] / "run_me.py").write_text("raise SystemExit('it ran')")
    handler.stop = staticmethod(lambda: (server.shutdown(), server.server_close()))
    yield handler
    handler.stop()


def test_a_captioner_is_loaded_by_its_name(hub, tmp_path):
    image = save_image(tmp_path / "photo.png")
    here, there = load(tmp_path / "best.ckpt"), load("hf:owner/mine")
    assert there(image, max_length=6).log_probs == here(image, max_length=6).log_probs
    fetched = {asked.removeprefix("GET ") for asked in hub.asked if asked.startswith("GET")}
    assert fetched == {"config.json", "vocabulary.json", "model.safetensors"}


def test_a_revision_is_the_one_that_is_asked_for(hub, tmp_path):
    other = load(save_checkpoint(tmp_path / "other.ckpt", gated=False))
    other.export(hub.root / "owner/mine" / COMMITS["v1"])
    assert not load("hf:owner/mine@v1").model.decoder.gated
    assert load(f"hf:owner/mine@{COMMITS['main']}").model.decoder.gated


def test_what_was_downloaded_once_is_there_without_a_connection(hub, tmp_path, monkeypatch):
    load("hf:owner/mine")
    hub.stop()
    assert load("hf:owner/mine").vocabulary == load(tmp_path / "best.ckpt").vocabulary
    with pytest.raises(InputError, match="hf:owner/mine@v1: "):
        load("hf:owner/mine@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(load("hf:owner/mine").vocabulary) == len(load(tmp_path / "best.ckpt").vocabulary)


@pytest.mark.parametrize("name", ["hf:owner/mine/more", "hf:owner/../mine", "hf:owner/yours", "hf:owner/mine@v2"])
def test_a_wrong_name_is_one_line(hub, name):
    with pytest.raises(InputError) as caught:
        load(name)
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("config", ['{"model_type": "bert"}', "[]"])
def test_of_something_else_nothing_but_its_configuration_is_fetched(hub, config):
    folder = hub.root / "owner/mine" / COMMITS["main"]
    (folder / "config.json").write_text(config)
    with pytest.raises(InputError, match="hf:owner/mine: no captioner of this project"):
        load("hf:owner/mine")
    assert not [asked for asked in hub.asked if "model" in asked]
