import dataclasses
import hashlib
import http.server
import io
import json
import random
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from unittest import mock

import pytest
import yaml
from helpers import SCRIPTS

from captioning.cli import prepare
from captioning.data import download
from captioning.encoders import MobileNetV1, TimmEncoder
from captioning.errors import InputError

PAYLOAD = bytes(range(256)) * 4000  # 1 MB


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "*")
    return prepare


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


def published(archive, body):
    """An archive's entry as it would be had ``body`` been published."""
    return dataclasses.replace(archive, size=len(body), md5=hashlib.md5(body).hexdigest())


@pytest.fixture
def coco(script, server, monkeypatch):
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
    table = dict(script.COCO)
    for key, body in bodies.items():
        archive = dataclasses.replace(table[2017, key], images=len(names.get(key, ())))
        table[2017, key] = published(archive, body)
        server.files[archive.at("")] = body
    monkeypatch.setattr(script, "COCO", table)
    return lambda root, *options: script.main(["coco", "--root", str(root), "--mirror", server.url, *options])


def test_coco_is_downloaded_unpacked_and_checked(coco, tmp_path, capsys):
    coco(tmp_path / "coco")
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
    assert "train2017.zip: MD5 is the published one" in printed
    assert re.search(r"train +3 images +3 captions +all files there", printed)


def test_a_second_run_fetches_nothing(coco, server, tmp_path):
    coco(tmp_path)
    before = len(server.requests)
    coco(tmp_path)
    coco(tmp_path, "--check")
    assert len(server.requests) == before == 3


def test_only_what_is_missing_is_fetched_again(coco, server, tmp_path):
    coco(tmp_path)
    server.requests.clear()
    (tmp_path / "val2017/4.jpg").unlink()
    (tmp_path / "val2017/.DS_Store").touch()  # not an image, and not counted as one
    kept = (tmp_path / "val2017/5.jpg").stat().st_mtime_ns
    coco(tmp_path)
    assert [path for path, _ in server.requests] == ["/zips/val2017.zip"]
    assert (tmp_path / "val2017/5.jpg").stat().st_mtime_ns == kept


def test_an_archive_put_there_by_hand_is_used_and_deleted_when_it_is_unpacked(coco, server, tmp_path):
    (tmp_path / "val2017.zip").write_bytes(server.files["/zips/val2017.zip"])
    coco(tmp_path)
    assert "/zips/val2017.zip" not in [path for path, _ in server.requests]
    assert (tmp_path / "val2017/5.jpg").exists() and not list(tmp_path.glob("*.zip"))


def test_checking_names_missing_and_empty_files_and_fetches_nothing(coco, server, tmp_path, capsys):
    coco(tmp_path)
    server.requests.clear()
    (tmp_path / "train2017/2.jpg").unlink()
    (tmp_path / "val2017/5.jpg").write_bytes(b"")
    with pytest.raises(SystemExit) as exit_:
        coco(tmp_path, "--check")
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert re.search(r"train .* 1 image files missing\nval .* 1 image files missing", out)
    assert err.startswith(f"error: missing: {tmp_path}/train2017/2.jpg, {tmp_path}/val2017/5.jpg")
    assert err.count("\n") == 1
    assert server.requests == []


def test_an_interrupted_unpacking_goes_on(coco, tmp_path):
    (tmp_path / "val2017").mkdir()
    (tmp_path / "val2017/4.jpg").write_text("4.jpg")  # shorter than in the archive
    (tmp_path / "val2017/5.jpg.part").write_text("half")
    coco(tmp_path)
    assert (tmp_path / "val2017/4.jpg").read_text() == "4.jpg" * 50
    assert sorted(path.name for path in (tmp_path / "val2017").iterdir()) == ["4.jpg", "5.jpg"]


def test_karpathys_coco_needs_the_2014_images(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["coco", "--karpathy", "--year", "2017", "--root", str(tmp_path)])
    assert "--karpathy is a split of the 2014 images" in capsys.readouterr().err


@pytest.fixture
def fetch(script, server, tmp_path):
    server.files["/big.bin"] = PAYLOAD

    def fetch(size=None):
        part = download.download(f"{server.url}/big.bin", tmp_path / "big.bin", size)
        assert part == tmp_path / "big.bin.part"
        return part.read_bytes()

    return fetch


def test_a_broken_connection_is_taken_up_where_it_broke(fetch, server, capsys):
    server.faults = ["cut 300000", "cut 700000"]
    assert fetch(len(PAYLOAD)) == PAYLOAD
    assert [wanted for _, wanted in server.requests] == [None, "bytes=300000-", "bytes=700000-"]
    assert "big.bin: the connection broke; trying again" in capsys.readouterr().out


def test_an_earlier_download_is_continued(fetch, server, tmp_path):
    (tmp_path / "big.bin.part").write_bytes(PAYLOAD[:1000])
    assert fetch() == PAYLOAD
    assert [wanted for _, wanted in server.requests] == ["bytes=1000-"]


def test_a_server_that_cannot_continue_is_asked_for_all(fetch, server, tmp_path, capsys):
    server.ranges = False
    (tmp_path / "big.bin.part").write_bytes(b"x" * 1000)
    assert fetch(len(PAYLOAD)) == PAYLOAD
    assert "cannot resume a download, starting over" in capsys.readouterr().out


@pytest.mark.parametrize("size", [None, len(PAYLOAD)])
def test_a_complete_download_is_not_fetched_again(fetch, tmp_path, size):
    (tmp_path / "big.bin.part").write_bytes(PAYLOAD)
    assert fetch(size) == PAYLOAD


@pytest.mark.parametrize("size", [None, len(PAYLOAD)])
def test_a_download_longer_than_the_file_is_thrown_away(fetch, tmp_path, size):
    (tmp_path / "big.bin.part").write_bytes(PAYLOAD + b"more")
    assert fetch(size) == PAYLOAD


def test_a_busy_server_is_asked_again(fetch, server):
    server.faults = ["status 503", "status 429"]
    assert fetch() == PAYLOAD
    assert len(server.requests) == 3


def test_a_missing_file_is_not_asked_for_again(fetch, server, tmp_path):
    server.files.clear()
    with pytest.raises(InputError, match=rf"/big\.bin: the server says 404 .* by hand to {tmp_path}/big\.bin"):
        fetch()
    assert len(server.requests) == 1


def test_a_connection_that_keeps_breaking_ends_with_what_to_do(fetch, server, script):
    server.faults = ["status 500"] * 9
    with pytest.raises(InputError, match=r"the server says 500 .*; run the same command again to resume"):
        fetch()
    assert len(server.requests) == download.ATTEMPTS


def test_a_server_that_is_not_there_is_named(script, server, tmp_path):
    server.server_close()
    with pytest.raises(InputError, match=r"/x\.zip: .*refused.*; run the same command again"):
        download.download(f"{server.url}/x.zip", tmp_path / "x.zip")


def test_another_length_than_published_is_refused_before_the_download(fetch, server, tmp_path):
    with pytest.raises(InputError, match=rf"has {len(PAYLOAD)} bytes, published were 5"):
        fetch(5)
    assert not (tmp_path / "big.bin.part").exists()


def test_an_encrypted_archive_is_refused_in_one_line(tmp_path):
    content = bytearray(zipped({"images/1.jpg": b"x"}))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags, beside the file and in the list
        content[content.index(signature) + place] |= 1
    (tmp_path / "mine.zip").write_bytes(content)
    with pytest.raises(InputError, match=r"mine.zip: damaged \(.*encrypted"):
        download.unpack(tmp_path / "mine.zip", tmp_path, lambda name: True)
    with pytest.raises(InputError, match=r"mine.zip: not a whole zip file \(.*encrypted"):
        download.verify(tmp_path / "mine.zip")


def test_a_wrong_checksum_is_refused_and_the_download_thrown_away(coco, script, server, tmp_path, capsys):
    path = "/zips/train2017.zip"
    server.files[path] = server.files[path].replace(b"1.jpg1.jpg", b"1.jpg1.jqg")
    with pytest.raises(SystemExit) as exit_:
        coco(tmp_path)
    assert exit_.value.code == 2
    expected = script.COCO[2017, "train"].md5
    assert re.search(rf"train2017\.zip.*: its MD5 is \w+, published was {expected}", capsys.readouterr().err)
    assert not list(tmp_path.glob("train2017*"))


def test_a_wrong_archive_put_there_by_hand_is_named_and_left_alone(coco, tmp_path, capsys):
    (tmp_path / "val2017.zip").write_bytes(b"x" * 9)
    with pytest.raises(SystemExit):
        coco(tmp_path)
    assert re.search(r"val2017\.zip: has 9 bytes, published were \d+; delete it", capsys.readouterr().err)
    assert (tmp_path / "val2017.zip").exists()


def test_a_full_disk_is_reported_before_the_download(coco, script, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(SystemExit):
        coco(tmp_path)
    assert re.search(r"needs .* kB, the disk has 0 bytes free; use --root", capsys.readouterr().err)
    assert server.requests == []


def test_without_a_published_checksum_those_inside_the_zip_are_used(script, tmp_path, capsys):
    body = zipped({"a.json": "content " * 9})
    (tmp_path / "a.zip").write_bytes(body)
    download.verify(tmp_path / "a.zip")
    assert "no checksum was published" in capsys.readouterr().out
    for broken in (body.replace(b"content content", b"content c0ntent"), body[:-30], b"<html>"):
        (tmp_path / "a.zip").write_bytes(broken)
        with pytest.raises(InputError, match=r"a\.zip: .*download it again"):
            download.verify(tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["../evil.jpg", "/evil.jpg"])
def test_an_archive_that_writes_elsewhere_is_refused(script, tmp_path, name):
    (tmp_path / "a.zip").write_bytes(zipped({name: "x"}))
    with pytest.raises(InputError, match=r"evil\.jpg leads out of"):
        download.unpack(tmp_path / "a.zip", tmp_path / "root", lambda name: True)
    assert not list(tmp_path.rglob("evil*"))


@pytest.fixture
def flickr(script, server):
    """Karpathy's archive with three Flickr8k images."""
    images = [
        {"imgid": i, "split": split, "filename": f"{i}.jpg", "sentences": [{"tokens": ["a", "dog"]}]}
        for i, split in enumerate(("train", "val", "test"))
    ]
    content = json.dumps({"images": images, "dataset": "flickr8k"})
    server.files["/people/karpathy/deepimagesent/caption_datasets.zip"] = zipped(
        {"dataset_flickr8k.json": content, "dataset_coco.json": "{}"}
    )
    return lambda root, *options: script.main(["flickr8k", "--root", str(root), "--mirror", server.url, *options])


def test_what_must_be_asked_for_by_hand_is_said(flickr, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        flickr(tmp_path)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert "Fill in the form at https://forms.illinois.edu/" in out
    assert f"Put Flickr8k_Dataset.zip (about 1 GB) into {tmp_path}, or its jpg files into {tmp_path}/images" in out
    assert f"error: missing: {tmp_path}/images/0.jpg" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset_flickr8k.json"]


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "two tars"])
def test_images_put_there_by_hand_are_unpacked(flickr, tmp_path, capsys, kind):
    names = [f"Flicker8k_Dataset/{i}.jpg" for i in range(3)]
    if kind == "zip":
        others = {"__MACOSX/Flicker8k_Dataset/._0.jpg": "x", "Flicker8k_Dataset/unused.jpg": "x"}
        (tmp_path / "Flickr8k_Dataset.zip").write_bytes(zipped({**dict.fromkeys(names, "jpeg"), **others}))
    else:
        parts = [("a.tar.gz", names)] if kind == "tar.gz" else [("a.tar", names[:2]), ("b.tar", names[2:])]
        for part, members in parts:
            with tarfile.open(tmp_path / part, "w:gz" if part.endswith("gz") else "w") as file:
                for name in members:
                    info = tarfile.TarInfo(name)
                    info.size = 4
                    file.addfile(info, io.BytesIO(b"jpeg"))
    flickr(tmp_path)
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["0.jpg", "1.jpg", "2.jpg"]
    assert len(re.findall("all files there", capsys.readouterr().out)) == 3


def test_a_damaged_archive_put_there_by_hand_is_named(flickr, tmp_path, capsys):
    (tmp_path / "Flickr8k_Dataset.zip").write_bytes(b"half")
    with pytest.raises(SystemExit):
        flickr(tmp_path)
    assert "Flickr8k_Dataset.zip: damaged" in capsys.readouterr().err


def test_a_damaged_byte_of_a_compressed_tar_is_found_before_anything_is_unpacked(tmp_path):
    """The files of the archive have no checksums, the whole of it has one at its end."""
    path, content = tmp_path / "a.tar.gz", random.Random(0).randbytes(50_000)
    with tarfile.open(path, "w:gz") as file:
        info = tarfile.TarInfo("a.jpg")
        info.size = len(content)
        file.addfile(info, io.BytesIO(content))
    damaged = bytearray(path.read_bytes())
    damaged[25_000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"a\.tar\.gz: damaged .*download it again"):
        download.unpack(path, tmp_path / "root", lambda name: True)
    assert not (tmp_path / "root").exists()


def test_damage_inside_a_compressed_zip_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.json", "".join(map(str, range(9999))))
    whole = (tmp_path / "a.zip").read_bytes()
    for place in range(60, len(whole) - 100, 97):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "a.zip").write_bytes(damaged)
        with pytest.raises(InputError, match="download it again"):
            download.verify(tmp_path / "a.zip")


def test_a_mirror_is_an_address(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["flickr8k", "--root", str(tmp_path), "--mirror", "myserver/coco"])
    assert "error: --mirror myserver/coco: must begin with https:// or http://" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["http://[", "http://", "http:///coco", "https://x:99999/", "http://a b/", "http://\u732b/"]
)
def test_what_is_no_address_is_refused_before_it_is_tried(script, tmp_path, capsys, address):
    with pytest.raises(SystemExit) as ended:
        script.main(["flickr8k", "--root", str(tmp_path), "--mirror", address])
    assert ended.value.code == 2
    assert f"error: --mirror {address}: is not an address" in capsys.readouterr().err


@pytest.mark.parametrize("header", ["Content-Length: Infinity", "Content-Length: \xb2", "Location: http://["])
def test_what_a_server_says_wrongly_is_no_traceback(tmp_path, monkeypatch, header):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "*")
    status = "302 Found" if "Location" in header else "200 OK"
    answer = f"HTTP/1.1 {status}\r\n{header}\r\n\r\nabc".encode("latin-1")
    connection = mock.Mock(makefile=lambda *_: io.BytesIO(answer))
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: connection)
    if "Location" in header:
        with pytest.raises(InputError, match=r"^http://x/a: Invalid IPv6 URL; download it by hand"):
            download.download("http://x/a", tmp_path / "a")
    else:
        assert download.download("http://x/a", tmp_path / "a").read_bytes() == b"abc"


def test_a_name_in_a_zip_that_is_no_utf_8_is_damage(tmp_path):
    archive = zipped({"\u00e9.json": "{}"}).replace("\u00e9".encode(), b"\xff\xff")
    (tmp_path / "a.zip").write_bytes(archive)
    with pytest.raises(InputError, match="download it again"):
        download.verify(tmp_path / "a.zip")
    with pytest.raises(InputError, match="download it again"):
        download.unpack(tmp_path / "a.zip", tmp_path / "root", lambda name: True)


def test_a_name_in_a_zip_may_be_empty(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped({"x": "", "a.json": "{}"}).replace(b"x", b"\0"))
    download.unpack(tmp_path / "a.zip", tmp_path / "root", lambda name: name == "a.json")
    assert (tmp_path / "root/a.json").read_text() == "{}"


def test_the_names_of_splits_do_not_control_a_terminal(flickr, server, tmp_path, capsys):
    images = [{"split": split, "filename": "1.jpg", "imgid": 1} for split in ("train", "val", "\x1b[2J")]
    sentences = [{"tokens": ["a"]}]
    content = json.dumps({"images": [image | {"sentences": sentences} for image in images]})
    (tmp_path / "dataset_flickr8k.json").write_text(content)
    with pytest.raises(SystemExit):
        flickr(tmp_path)
    assert r"has no test split, only \x1b[2J, train, val" in (printed := capsys.readouterr().out)
    assert "\x1b" not in printed


def test_a_damaged_test_split_is_no_missing_one(flickr, server, tmp_path, capsys):
    images = [
        {"split": split, "filename": f"{split}.jpg", "imgid": number, "sentences": [{"tokens": ["a"]}]}
        for number, split in enumerate(("train", "val", "test"))
    ]
    images[-1]["sentences"] = [{}]
    (tmp_path / "dataset_flickr8k.json").write_text(json.dumps({"images": images}))
    with pytest.raises(SystemExit) as ended:
        flickr(tmp_path, "--check")
    assert ended.value.code == 2 and "has a sentence without tokens" in capsys.readouterr().err


def test_shapes_may_lie_behind_a_link(script, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "shapes").symlink_to(tmp_path / "disk")
    script.main(["shapes", "--root", str(tmp_path / "shapes"), "--train", "3", "--val", "2", "--test", "1"])
    assert (tmp_path / "disk/shapes.json").is_file() and (tmp_path / "shapes").is_symlink()


@pytest.mark.parametrize("option", [["--seed", "-1"], ["--train", "1_000"], ["--val", "0"]])
def test_numbers_of_shapes_are_whole(script, tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        script.main(["shapes", "--root", str(tmp_path / "s"), *option])
    assert f"argument {option[0]}: must be a whole number of at least" in capsys.readouterr().err


def test_shapes_are_generated_and_checked(script, tmp_path, capsys):
    root = str(tmp_path / "shapes")
    with pytest.raises(SystemExit):
        script.main(["shapes", "--root", root, "--check"])
    counts = ["--train", "3", "--val", "2", "--test", "1", "--seed", "7"]
    script.main(["shapes", "--root", root, *counts])
    script.main(["shapes", "--root", root, *counts, "--check"])
    out = capsys.readouterr().out
    assert len(re.findall(r"train +3 images +15 captions +all files there", out)) == 2
    assert len(re.findall("test +1 images", out)) == 2
    with pytest.raises(SystemExit):
        script.main(["shapes", "--root", root, *counts[:-1], "8", "--check"])
    assert "made with seed 7 instead of 8" in capsys.readouterr().err


def test_weights_are_written_where_the_mobilenet_configs_read_them(script, tmp_path, monkeypatch, capsys):
    timm = pytest.importorskip("timm")
    create = timm.create_model

    def published(name, **options):
        """Random weights in the place of the download."""
        return create(name, **options | {"pretrained": False})

    monkeypatch.setattr(timm, "create_model", published)
    with pytest.raises(SystemExit):
        script.main(["weights", "--root", str(tmp_path), "--check"])
    assert "mobilenetv1_100_trunk.safetensors: missing" in capsys.readouterr().err
    script.main(["weights", "--root", str(tmp_path)])
    script.main(["weights", "--root", str(tmp_path), "--check"])
    assert "the published weights" in (out := capsys.readouterr().out) and "fits mobilenetv1_100 of timm" in out
    for config in (SCRIPTS.parent / "configs").glob("*mobilenet*.yaml"):
        weights = yaml.safe_load(config.read_text())["model"]["encoder"]["init_args"]["weights"]
        assert weights == f"data/weights/{script.MOBILENET_FILE}"
    written = str(tmp_path / script.MOBILENET_FILE)
    MobileNetV1(12, weights=written)
    for block in (3, "blocks.4.0"):
        TimmEncoder("mobilenetv1_100", block, weights=written)


def test_weights_that_cannot_be_downloaded_are_explained(script, tmp_path, capsys):
    pytest.importorskip("timm")
    with pytest.raises(SystemExit):
        script.main(["weights", "--root", str(tmp_path)])
    error = capsys.readouterr().err
    assert "By hand: get model.safetensors of mobilenetv1_100" in error and error.count("\n") == 1


def test_help_comes_without_importing_what_is_slow():
    program = (
        f"import runpy, sys; sys.argv = ['x', 'coco', '--help']\n"
        f"try: runpy.run_path({str(SCRIPTS / 'prepare_data.py')!r}, run_name='__main__')\n"
        f"except SystemExit: pass\n"
        f"slow = {{'torch', 'numpy', 'nltk', 'rich', 'pycocotools'}} & set(sys.modules)\n"
        f"assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--karpathy" in done.stdout
