"""Captioners by name from the hub; a folder replaces the only function of the hub that is called."""

from pathlib import Path

import pytest
from helpers import save_image
from helpers_runs import save_checkpoint

from captioning.errors import InputError
from captioning.inference import load

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the hub extra")

COMMITS = {None: "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A hub with the captioner owner/mine, as ROOT/owner/mine/COMMIT."""
    root = tmp_path / "hub"

    def snapshot_download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert set(allow_patterns) == {"config.json", "vocabulary.json", "model.safetensors"}
        path = root / repository / COMMITS.get(revision, str(revision))
        if not path.exists():
            raise ConnectionError(f"404 Client Error\n\nno {repository}")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for revision, commit in COMMITS.items():
        captioner = load(save_checkpoint(tmp_path / f"{revision}.ckpt", gated=revision is None))
        captioner.export(root / "owner/mine" / commit)
    return root / "owner/mine"


def test_a_captioner_is_loaded_by_its_name_and_revision(hub, tmp_path):
    image = save_image(tmp_path / "photo.png")
    here, there = load(tmp_path / "None.ckpt"), load("hf:owner/mine")
    assert there(image, max_length=6).log_probs == here(image, max_length=6).log_probs
    assert there.model.decoder.gated and not load("hf:owner/mine@v1").model.decoder.gated


@pytest.mark.parametrize("name", ["hf:owner/yours", "hf:owner/mine@v2"])
def test_a_missing_repository_or_revision_is_one_line(hub, name):
    with pytest.raises(InputError, match=r"404 Client Error no owner/") as caught:
        load(name)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("config", ['{"model_type": "bert"}', "[]"])
def test_a_repository_without_a_captioner_is_refused_in_one_line(hub, config):
    (hub / COMMITS[None] / "config.json").write_text(config)
    with pytest.raises(InputError, match="hf:owner/mine: damaged, or does not describe the model of its weights"):
        load("hf:owner/mine")
