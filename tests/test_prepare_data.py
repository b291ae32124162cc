"""`captioning prepare`: data sets from a server, unpacked and checked; what is missing is named."""

import functools
import hashlib
import http.server
import io
import json
import re
import shutil
import tarfile
import threading
import urllib.parse
import zipfile
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import SCRIPTS
from helpers_faults import command, refusal

from captioning.cli import prepare
from captioning.encoders import EfficientNetLite2, TimmEncoder


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """Serves the files below ``folder``, and notes the paths of requests."""
    monkeypatch.setenv("no_proxy", "*")
    folder, requests = tmp_path_factory.mktemp("served"), []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            requests.append(self.path)

    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", folder=folder, requests=requests)
        server.shutdown()


def write_zip(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


@pytest.fixture
def coco(server, monkeypatch):
    """COCO 2017 with three training images and two validation images, on the server."""
    names = {"train": ["1.jpg", "2.jpg", "3.jpg"], "val": ["4.jpg", "5.jpg"]}
    annotations = {}
    for split, images in names.items():
        content = {
            "images": [{"id": int(name[0]), "file_name": name} for name in images],
            "annotations": [{"id": i, "image_id": int(name[0]), "caption": "A cat."} for i, name in enumerate(images)],
        }
        for kind in ("captions", "instances", "person_keypoints"):
            annotations[f"annotations/{kind}_{split}2017.json"] = json.dumps(content)
    contents = {"annotations": annotations}
    for split, images in names.items():
        contents[split] = {f"{split}2017/": "", **{f"{split}2017/{name}": name * 50 for name in images}}
    for key, files in contents.items():
        archive = prepare.COCO[2017, key]
        path = urllib.parse.urlsplit(archive.url).path
        body = write_zip(server.folder / path[1:], files).read_bytes()
        new = (server.url + path, len(body), hashlib.md5(body).hexdigest(), len(names.get(key, ())))
        monkeypatch.setitem(prepare.COCO, (2017, key), prepare.Archive(*new))
    return lambda root, *options: ("prepare", "coco", "--root", root, *options)


def test_coco_is_downloaded_unpacked_and_checked(coco, tmp_path, capsys):
    command(*coco(tmp_path / "coco"))
    there = {path.relative_to(tmp_path / "coco").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    kinds = ("captions_train", "captions_val", "instances_train", "instances_val")
    images = {"train2017/1.jpg", "train2017/2.jpg", "train2017/3.jpg", "val2017/4.jpg", "val2017/5.jpg"}
    assert there == {f"annotations/{kind}2017.json" for kind in kinds} | images
    assert (tmp_path / "coco/val2017/5.jpg").read_text() == "5.jpg" * 50
    printed = capsys.readouterr().out
    assert re.search(r"train +3 images +3 captions +all files there", printed)


def test_a_second_run_fetches_nothing(coco, server, tmp_path):
    command(*coco(tmp_path))
    before = len(server.requests)
    command(*coco(tmp_path))
    assert len(server.requests) == before == 3


def test_only_what_is_missing_is_fetched_again(coco, server, tmp_path):
    command(*coco(tmp_path))
    server.requests.clear()
    (tmp_path / "val2017/4.jpg").unlink()
    (tmp_path / "val2017/.DS_Store").touch()  # not an image, and not counted as one
    kept = (tmp_path / "val2017/5.jpg").stat().st_mtime_ns
    command(*coco(tmp_path))
    assert server.requests == ["/zips/val2017.zip"]
    assert (tmp_path / "val2017/5.jpg").stat().st_mtime_ns == kept


def test_an_archive_put_there_by_hand_is_used_and_deleted_when_it_is_unpacked(coco, server, tmp_path):
    shutil.copy(server.folder / "zips/val2017.zip", tmp_path)
    command(*coco(tmp_path))
    assert "/zips/val2017.zip" not in server.requests
    assert (tmp_path / "val2017/5.jpg").exists() and not list(tmp_path.glob("*.zip"))


def test_a_full_disk_is_reported_before_the_download(coco, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert "the disk has 0.0 GB free; give --root on another disk" in refusal(capsys, *coco(tmp_path))
    assert server.requests == []


@pytest.fixture
def flickr(server, monkeypatch):
    """Karpathy's archive with three Flickr8k images."""
    images = [
        {"imgid": i, "split": split, "filename": f"{i}.jpg", "sentences": [{"tokens": ["a", "dog"]}]}
        for i, split in enumerate(("train", "val", "test"))
    ]
    content = json.dumps({"images": images, "dataset": "flickr8k"})
    write_zip(server.folder / "karpathy.zip", {"dataset_flickr8k.json": content, "dataset_coco.json": "{}"})
    monkeypatch.setattr(prepare, "KARPATHY_URL", f"{server.url}/karpathy.zip")
    return lambda root: ("prepare", "flickr8k", "--root", root)


def test_files_to_request_by_hand_are_named(flickr, tmp_path, capsys):
    line = refusal(capsys, *flickr(tmp_path))
    assert f'image files of the split are missing or empty, such as "{tmp_path}/images/0.jpg"' in line
    assert f"Fill in https://forms.illinois.edu/sec/1713398, put Flickr8k_Dataset.zip into {tmp_path}" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset_flickr8k.json"]


@pytest.mark.parametrize("folder", ["Flicker8k_Dataset/", "", "a/b/"])
@pytest.mark.parametrize("name", ["Flickr8k_Dataset.zip", "a.tar.gz", "b.tgz", "c.tar", "D.ZIP"])
def test_archives_of_images_put_there_by_hand_are_unpacked(flickr, tmp_path, capsys, name, folder):
    names = [f"{folder}{i}.{'JPG' if i else 'jpg'}" for i in range(3)]
    if name.lower().endswith("zip"):
        others = {"__MACOSX/Flicker8k_Dataset/._0.jpg": "x", "captions.txt": "x"}
        write_zip(tmp_path / name, {**dict.fromkeys(names, "jpeg"), **others})
    else:
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as file:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = 4
                file.addfile(info, io.BytesIO(b"jpeg"))
    command(*flickr(tmp_path))
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["0.jpg", "1.jpg", "2.jpg"]
    assert len(re.findall("all files there", capsys.readouterr().out)) == 3


@pytest.mark.parametrize("folder", ["Flicker8k_Dataset", "", "archive/Images"])
def test_images_that_are_unpacked_already_are_used_where_they_are(flickr, tmp_path, capsys, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for i in range(3):
        (tmp_path / folder / f"{i}.jpg").write_text("jpeg")
    for _ in range(2):
        command(*flickr(tmp_path))
        assert len(re.findall("all files there", capsys.readouterr().out)) == 3


def test_an_archive_of_something_else_is_no_archive_of_images(flickr, tmp_path, capsys):
    write_zip(tmp_path / "Flickr8k_text.zip", {"Flickr8k.token.txt": "x"})
    line = refusal(capsys, *flickr(tmp_path))
    assert ". Fill in https://forms" in line


def test_shapes_are_generated_and_checked(tmp_path, capsys):
    words = ["prepare", "shapes", "--root", tmp_path / "shapes", "--train", 3, "--val", 2, "--test", 1, "--seed"]
    command(*words, 7)
    command(*words, 7)
    assert len(re.findall(r"train +3 images +15 captions +all files there", capsys.readouterr().out)) == 2
    assert "seed" in refusal(capsys, *words, 8)


@pytest.fixture
def weights(server, monkeypatch):
    """Random weights of the whole network, on the server."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    save_file(timm.create_model("tf_efficientnet_lite2").state_dict(), server.folder / "model.safetensors")
    monkeypatch.setattr(prepare, "WEIGHTS_URL", f"{server.url}/model.safetensors")
    return lambda root: ("prepare", "weights", "--root", root)


def test_weights_are_downloaded_once_to_where_the_lite2_configs_read_them(server, weights, tmp_path, capsys):
    command(*weights(tmp_path))
    command(*weights(tmp_path))
    assert server.requests == ["/model.safetensors"] and "fits EfficientNetLite2" in capsys.readouterr().out
    configs = sorted((SCRIPTS.parent / "configs").glob("*lite2*.yaml"))
    settings = [yaml.safe_load(config.read_text())["model"]["encoder"]["init_args"] for config in configs]
    assert {each["weights"] for each in settings} == {f"data/weights/{prepare.WEIGHTS_FILE}"}
    written = str(tmp_path / prepare.WEIGHTS_FILE)
    encoders = EfficientNetLite2(weights=written), TimmEncoder("tf_efficientnet_lite2", "head", weights=written)
    ours, theirs = (encoder.load_published_weights() for encoder in encoders)
    assert ours.identity()["weights"] == theirs.identity()["weights"]


def test_a_file_of_another_networks_weights_is_refused(weights, tmp_path, capsys):
    from safetensors.torch import save_file

    save_file({"conv_stem.weight": torch.ones(32, 3, 3, 3)}, path := tmp_path / prepare.WEIGHTS_FILE)
    assert f"{path}: the file of another network" in refusal(capsys, *weights(tmp_path))
