"""`captioning prepare`: data sets from a server, unpacked and checked; what is missing is named."""

from __future__ import annotations

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

import pytest
import yaml
from helpers import SCRIPTS
from helpers_faults import command, refused

from captioning.cli import prepare
from captioning.data import download
from captioning.encoders import MobileNetV1, TimmEncoder
from captioning.errors import InputError

PAYLOAD = bytes(range(256)) * 4000  # 1 MB


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "*")


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files`` by path. ``faults`` holds what goes wrong at the next requests: a status, or bytes to cut at."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.faults, self.ranges = {}, [], [], True
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that hangs up early is no error of the server's."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.requests.append((self.path, wanted))
        fault = self.server.faults.pop(0) if self.server.faults else None
        body = self.server.files.get(self.path)
        if body is None or (fault or "").startswith("status"):
            return self.send_error(int(fault.split()[1]) if fault else 404)
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.server.ranges else 0
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = int(fault.split()[1]) if fault else len(body)
        return self.wfile.write(body[start:end])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


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
    bodies = {"annotations": zipped(annotations)}
    for split, images in names.items():
        bodies[split] = zipped({f"{split}2017/": "", **{f"{split}2017/{name}": name * 50 for name in images}})
    table = dict(prepare.COCO)
    for key, body in bodies.items():
        archive = table[2017, key]._replace(images=len(names.get(key, ())), size=len(body))
        table[2017, key] = archive._replace(md5=hashlib.md5(body).hexdigest())
        server.files[urllib.parse.urlsplit(archive.url).path] = body
    monkeypatch.setattr(prepare, "COCO", table)
    return lambda root, *options: ("prepare", "coco", "--root", root, "--mirror", server.url, *options)


def test_coco_is_downloaded_unpacked_and_checked(coco, tmp_path, capsys):
    command(*coco(tmp_path / "coco"))
    there = {path.relative_to(tmp_path / "coco").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {
        "annotations/captions_train2017.json",
        "annotations/captions_val2017.json",
        "annotations/instances_train2017.json",
        "annotations/instances_val2017.json",
        "train2017/1.jpg",
        "train2017/2.jpg",
        "train2017/3.jpg",
        "val2017/4.jpg",
        "val2017/5.jpg",
    }
    assert (tmp_path / "coco/val2017/5.jpg").read_text() == "5.jpg" * 50
    printed = capsys.readouterr().out
    assert re.search(r"train +3 images +3 captions +all files there", printed)


def test_a_second_run_fetches_nothing(coco, server, tmp_path):
    command(*coco(tmp_path))
    before = len(server.requests)
    command(*coco(tmp_path))
    command(*coco(tmp_path, "--check"))
    assert len(server.requests) == before == 3


def test_only_what_is_missing_is_fetched_again(coco, server, tmp_path):
    command(*coco(tmp_path))
    server.requests.clear()
    (tmp_path / "val2017/4.jpg").unlink()
    (tmp_path / "val2017/.DS_Store").touch()  # not an image, and not counted as one
    kept = (tmp_path / "val2017/5.jpg").stat().st_mtime_ns
    command(*coco(tmp_path))
    assert [path for path, _ in server.requests] == ["/zips/val2017.zip"]
    assert (tmp_path / "val2017/5.jpg").stat().st_mtime_ns == kept


def test_an_archive_put_there_by_hand_is_used_and_deleted_when_it_is_unpacked(coco, server, tmp_path):
    (tmp_path / "val2017.zip").write_bytes(server.files["/zips/val2017.zip"])
    command(*coco(tmp_path))
    assert "/zips/val2017.zip" not in [path for path, _ in server.requests]
    assert (tmp_path / "val2017/5.jpg").exists() and not list(tmp_path.glob("*.zip"))


def test_checking_names_missing_files_and_fetches_nothing(coco, server, tmp_path, capsys):
    command(*coco(tmp_path))
    server.requests.clear()
    (tmp_path / "train2017/2.jpg").unlink()
    (tmp_path / "val2017/5.jpg").unlink()
    line = refused(capsys, *coco(tmp_path, "--check"))
    assert line.startswith(f"error: missing: {tmp_path}/train2017/2.jpg, {tmp_path}/val2017/5.jpg")
    assert server.requests == []


def test_karpathys_coco_needs_the_2014_images(coco, tmp_path, capsys):
    line = refused(capsys, *coco(tmp_path, "--karpathy", "--year", 2017))
    assert "--karpathy is a split of the 2014 images" in line


@pytest.fixture
def fetch(server, tmp_path):
    server.files["/big.bin"] = PAYLOAD

    def fetch() -> bytes:
        download.fetch(f"{server.url}/big.bin", tmp_path / "big.bin")
        return (tmp_path / "big.bin").read_bytes()

    return fetch


def test_a_broken_connection_is_taken_up_where_it_broke(fetch, server, capsys):
    server.faults = ["cut 300000", "cut 700000"]
    assert fetch() == PAYLOAD
    assert [wanted for _, wanted in server.requests] == [None, "bytes=300000-", "bytes=700000-"]
    assert "big.bin: the connection broke; trying again" in capsys.readouterr().out


def test_an_earlier_download_is_continued(fetch, server, tmp_path):
    (tmp_path / "big.bin.part").write_bytes(PAYLOAD[:1000])
    assert fetch() == PAYLOAD
    assert [wanted for _, wanted in server.requests] == ["bytes=1000-"]


def test_a_busy_server_is_asked_again(fetch, server):
    server.faults = ["status 503", "status 429"]
    assert fetch() == PAYLOAD
    assert len(server.requests) == 3


def test_a_missing_file_is_not_asked_for_again(fetch, server, tmp_path):
    server.files.clear()
    with pytest.raises(
        InputError, match=rf"/big\.bin: the server says 404; download it by hand to {tmp_path}/big\.bin"
    ):
        fetch()
    assert len(server.requests) == 1


def test_a_server_that_cannot_continue_is_asked_for_all(fetch, server, tmp_path):
    server.ranges = False
    (tmp_path / "big.bin.part").write_bytes(b"x" * 1000)
    assert fetch() == PAYLOAD


def test_a_complete_download_is_not_fetched_again(fetch, tmp_path):
    (tmp_path / "big.bin.part").write_bytes(PAYLOAD)
    assert fetch() == PAYLOAD


def test_a_connection_that_keeps_breaking_ends_with_what_to_do(fetch, server):
    server.faults = ["status 500"] * 9
    with pytest.raises(InputError, match=r"the server says 500; run the same command again to resume"):
        fetch()
    assert len(server.requests) == download.ATTEMPTS


def test_a_server_that_is_not_there_is_named(server, tmp_path):
    server.server_close()
    with pytest.raises(InputError, match=r"/x\.zip: .*refused.*; run the same command again"):
        download.fetch(f"{server.url}/x.zip", tmp_path / "x.zip")


def test_a_wrong_checksum_is_refused_and_the_download_thrown_away(coco, server, tmp_path, capsys):
    path = "/zips/train2017.zip"
    server.files[path] = server.files[path].replace(b"1.jpg1.jpg", b"1.jpg1.jqg")
    line = refused(capsys, *coco(tmp_path))
    assert f"train2017.zip: its MD5 is not the published {prepare.COCO[2017, 'train'].md5}" in line
    assert not list(tmp_path.glob("train2017*"))


def test_a_full_disk_is_reported_before_the_download(coco, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert "the disk has 0.0 GB free; use --root on another disk" in refused(capsys, *coco(tmp_path))
    assert server.requests == []


@pytest.mark.parametrize("name", ["../evil.jpg", "/evil.jpg"])
def test_an_archive_that_writes_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "a.zip").write_bytes(zipped({name: "x"}))
    with pytest.raises(InputError, match=r"evil\.jpg leads out of"):
        download.unpack(tmp_path / "a.zip", tmp_path / "root", lambda name: True)
    assert not list(tmp_path.rglob("evil*"))


@pytest.fixture
def flickr(server):
    """Karpathy's archive with three Flickr8k images."""
    images = [
        {"imgid": i, "split": split, "filename": f"{i}.jpg", "sentences": [{"tokens": ["a", "dog"]}]}
        for i, split in enumerate(("train", "val", "test"))
    ]
    content = json.dumps({"images": images, "dataset": "flickr8k"})
    server.files["/people/karpathy/deepimagesent/caption_datasets.zip"] = zipped(
        {"dataset_flickr8k.json": content, "dataset_coco.json": "{}"}
    )
    return lambda root, *options: ("prepare", "flickr8k", "--root", root, "--mirror", server.url, *options)


def test_what_must_be_asked_for_by_hand_is_said(flickr, tmp_path, capsys):
    line = refused(capsys, *flickr(tmp_path))
    assert f"error: missing: {tmp_path}/images/0.jpg" in line
    assert f"Fill in https://forms.illinois.edu/sec/1713398, put Flickr8k_Dataset.zip into {tmp_path}" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset_flickr8k.json"]


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_images_put_there_by_hand_are_unpacked(flickr, tmp_path, capsys, kind):
    names = [f"Flicker8k_Dataset/{i}.jpg" for i in range(3)]
    if kind == "zip":
        others = {"__MACOSX/Flicker8k_Dataset/._0.jpg": "x"}
        (tmp_path / "Flickr8k_Dataset.zip").write_bytes(zipped({**dict.fromkeys(names, "jpeg"), **others}))
    else:
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as file:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = 4
                file.addfile(info, io.BytesIO(b"jpeg"))
    command(*flickr(tmp_path))
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["0.jpg", "1.jpg", "2.jpg"]
    assert len(re.findall("all files there", capsys.readouterr().out)) == 3


def test_a_damaged_archive_put_there_by_hand_is_named(flickr, tmp_path, capsys):
    (tmp_path / "Flickr8k_Dataset.zip").write_bytes(b"half")
    assert "Flickr8k_Dataset.zip: damaged" in refused(capsys, *flickr(tmp_path))


def test_shapes_are_generated_and_checked(tmp_path, capsys):
    words = ["prepare", "shapes", "--root", tmp_path / "shapes", "--train", 3, "--val", 2, "--test", 1, "--seed"]
    command(*words, 7)
    command(*words, 7)
    assert len(re.findall(r"train +3 images +15 captions +all files there", capsys.readouterr().out)) == 2
    assert "seed" in refused(capsys, *words, 8)


def test_weights_are_written_where_the_mobilenet_configs_read_them(tmp_path, monkeypatch, capsys):
    timm = pytest.importorskip("timm")
    create = timm.create_model

    def published(name, **options):
        """Random weights in the place of the download."""
        return create(name, **options | {"pretrained": False})

    monkeypatch.setattr(timm, "create_model", published)
    command("prepare", "weights", "--root", tmp_path)
    command("prepare", "weights", "--root", tmp_path)
    assert "the published weights" in (out := capsys.readouterr().out) and "fits mobilenetv1_100 of timm" in out
    for config in (SCRIPTS.parent / "configs").glob("*mobilenet*.yaml"):
        weights = yaml.safe_load(config.read_text())["model"]["encoder"]["init_args"]["weights"]
        assert weights == f"data/weights/{prepare.MOBILENET_FILE}"
    written = str(tmp_path / prepare.MOBILENET_FILE)
    MobileNetV1(12, weights=written)
    for block in (3, "blocks.4.0"):
        TimmEncoder("mobilenetv1_100", block, weights=written)


def test_weights_that_cannot_be_downloaded_are_explained(tmp_path, capsys):
    pytest.importorskip("timm")
    line = refused(capsys, "prepare", "weights", "--root", tmp_path)
    assert "By hand: get model.safetensors of mobilenetv1_100" in line
