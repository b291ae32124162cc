"""Captioners by name from the hub, whose one function that is used is a folder here."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import save_image
from helpers_runs import save_checkpoint

from captioning.errors import InputError
from captioning.inference import load

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the hub extra")

COMMITS = {None: "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> tuple[Path, list[str]]:
    """A hub with the captioner owner/mine, as ROOT/owner/mine/COMMIT, and the files that it was asked for."""
    root, asked = tmp_path / "hub", []

    def hf_hub_download(repository: str, file: str, *, revision: str | None) -> str:
        path = root / repository / COMMITS.get(revision, str(revision)) / file
        asked.append(file)
        if not path.exists():
            raise ConnectionError(f"404 Client Error\n\nno {file}")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    for revision, commit in COMMITS.items():
        captioner = load(save_checkpoint(tmp_path / f"{revision}.ckpt", gated=revision is None))
        captioner.export(root / "owner/mine" / commit)
    return root / "owner/mine", asked


def test_a_captioner_is_loaded_by_its_name_and_revision(hub, tmp_path):
    image = save_image(tmp_path / "photo.png")
    here, there = load(tmp_path / "None.ckpt"), load("hf:owner/mine")
    assert there(image, max_length=6).log_probs == here(image, max_length=6).log_probs
    assert set(hub[1]) == {"config.json", "vocabulary.json", "model.safetensors"}
    assert there.model.decoder.gated and not load("hf:owner/mine@v1").model.decoder.gated


@pytest.mark.parametrize("name", ["hf:owner/yours", "hf:owner/mine@v2"])
def test_what_the_hub_lacks_is_one_line(hub, name):
    with pytest.raises(InputError, match=r"404 Client Error no config\.json") as caught:
        load(name)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("config", ['{"model_type": "bert"}', "[]"])
def test_of_something_else_nothing_but_its_configuration_is_fetched(hub, config):
    folder, asked = hub
    (folder / COMMITS[None] / "config.json").write_text(config)
    with pytest.raises(InputError, match="hf:owner/mine: no captioner of this project"):
        load("hf:owner/mine")
    assert asked == ["config.json"]
