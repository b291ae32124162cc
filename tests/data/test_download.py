"""Downloads resume where they broke, are verified, and are unpacked."""

import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from captioning.data import download
from captioning.data.download import fetch, unpack
from captioning.errors import InputError

PAYLOAD = bytes(range(256)) * 400
MD5 = hashlib.md5(PAYLOAD).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    """Serves PAYLOAD; it breaks off after ``bytes_at_a_time``, and may not know ``Range``."""

    bytes_at_a_time = len(PAYLOAD)
    resumes = True
    codes: list[int]
    asked: list[int]

    def do_GET(self) -> None:
        cls = type(self)
        if cls.codes:
            self.send_error(cls.codes.pop(0))
            return
        header = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(header[1]) if header and cls.resumes else 0
        cls.asked.append(first)
        if first >= len(PAYLOAD):
            self.send_error(416)
            return
        self.send_response(206 if header and cls.resumes else 200)
        self.send_header("Content-Length", str(len(PAYLOAD) - first))
        self.end_headers()
        self.wfile.write(PAYLOAD[first : first + cls.bytes_at_a_time])

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    handler = type("Handler", (Server,), {"codes": [], "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        handler.url = f"http://127.0.0.1:{running.server_address[1]}/x.zip"
        yield handler
        running.shutdown()
        thread.join()


def test_a_download_resumes_where_the_connection_broke(server, tmp_path, capsys):
    server.bytes_at_a_time = 40_000
    fetch(server.url, tmp_path / "new/x.zip", md5=MD5)
    assert (tmp_path / "new/x.zip").read_bytes() == PAYLOAD
    assert server.asked == [0, 40_000, 80_000]
    assert "x.zip: the connection broke; attempt 1 of 5" in capsys.readouterr().out
    fetch(server.url, tmp_path / "new/x.zip", md5=MD5)  # it is there
    assert len(server.asked) == 3 and [path.name for path in (tmp_path / "new").iterdir()] == ["x.zip"]


@pytest.mark.parametrize("have", [1000, len(PAYLOAD)])
@pytest.mark.parametrize("resumes", [True, False])
def test_an_incomplete_download_is_resumed_or_restarted(server, tmp_path, have, resumes):
    server.resumes = resumes
    (tmp_path / "x.zip.part").write_bytes(PAYLOAD[:have])
    fetch(server.url, tmp_path / "x.zip", md5=MD5)
    assert (tmp_path / "x.zip").read_bytes() == PAYLOAD and server.asked == [have if resumes else 0]


def test_a_busy_server_gets_five_attempts(server, tmp_path):
    server.codes = [503, 429, 408]
    fetch(server.url, tmp_path / "x.zip", md5=MD5)
    server.codes = [503] * 9
    with pytest.raises(InputError, match=r"HTTP Error 503: .*; run the same command again to resume, or .*y\.zip"):
        fetch(server.url, tmp_path / "y.zip")
    assert len(server.codes) == 4


@pytest.mark.parametrize("code", [403, 404])
def test_a_wrong_address_gets_one_attempt(server, tmp_path, code):
    server.codes = [code] * 2
    with pytest.raises(InputError, match=rf"x\.zip: HTTP Error {code}: .*; download the file to .*y\.zip"):
        fetch(server.url, tmp_path / "y.zip")
    assert server.codes == [code]


def test_a_download_with_a_wrong_checksum_is_refused_and_deleted(server, tmp_path):
    with pytest.raises(InputError, match="its MD5 is not the published 00"):
        fetch(server.url, tmp_path / "x.zip", md5="00")
    assert list(tmp_path.iterdir()) == []


def archive(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in files.items():
                packed.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as packed:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_wanted_files_are_unpacked_complete_files_skipped_and_damaged_archives_named(tmp_path, kind):
    files = {"a/1.jpg": b"one", "a/2.jpg": b"two", "a/readme": b"no"}
    packed, root = archive(tmp_path / f"x.{kind}", files), tmp_path / "out"
    (root / "a").mkdir(parents=True)
    (root / "a/1.jpg").write_bytes(b"1st")  # as long as the file in the archive
    (root / "a/2.jpg").write_bytes(b"t")  # cut short
    unpack(packed, root, r"\.jpg$")
    assert {path.name: path.read_bytes() for path in (root / "a").iterdir()} == {"1.jpg": b"1st", "2.jpg": b"two"}
    unpack(packed, tmp_path / "flat", r"2\.jpg$", flat=True)
    assert [path.name for path in (tmp_path / "flat").iterdir()] == ["2.jpg"]
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"x\.(zip|tar\.gz): damaged \("):
        unpack(packed, tmp_path / "again", "")
