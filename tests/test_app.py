"""The page of `captioning app` in a real Chromium: somebody drops a photo and sees its caption and the explorer."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import save_image
from helpers_faults import refusal
from helpers_runs import WORDS, save_checkpoint

from captioning.inference import load

pytestmark = pytest.mark.xdist_group("browser")  # the app and the browser are started once, in one process

ROOT = Path(__file__).resolve().parent.parent


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert refusal(capsys, "app") == "error: captioning app needs gradio: pip install -e '.[app]'"


@pytest.fixture(scope="module")
def extra() -> None:
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("the extra app is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """An exported folder."""
    file = save_checkpoint(tmp_path_factory.mktemp("run") / "best.ckpt", search={"max_length": 6})
    load(file).export(file.parent / "v1.2")
    return file.parent / "v1.2"


@pytest.fixture(scope="module")
def port(extra, checkpoint, tmp_path_factory) -> Iterator[int]:
    """The port of the command, which is started as by a user and ended with Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"GRADIO_TEMP_DIR": str(tmp_path_factory.mktemp("uploads"))}
    with subprocess.Popen(
        [sys.executable, "-m", "captioning", "app", "--model", str(checkpoint), "--port", str(port)],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        try:
            lines = iter(process.stderr.readline, b"")
            assert any(f"http://127.0.0.1:{port}/ (Ctrl-C ends it)".encode() in line for line in lines)
            yield port
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture
def page(port, browser):
    """The opened page, which must have made no request to another machine and logged no error when a test ends."""
    address, problems = f"http://127.0.0.1:{port}/", []
    page = browser.new_page()
    page.set_default_timeout(60_000)  # a machine may be busy with other tests
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith((address, "data:", "blob:")) else problems.append(request.url),
    )
    page.goto(address)
    yield page
    page.close()
    assert problems == []


def drop(page, file: Path) -> None:
    page.locator("input[type=file]").set_input_files(file)


@pytest.mark.slow
@pytest.mark.browser
def test_a_second_photo_replaces_the_first_and_its_caption(page, checkpoint, tmp_path):
    captioner = load(checkpoint)
    first, second = save_image(tmp_path / "first.png"), save_image(tmp_path / "second.jpg", seed=1)
    for photo in (first, second):
        drop(page, photo)
        explorer = page.frame_locator("iframe.frame")
        explorer.locator("h2", has_text=photo.name).wait_for()
        caption = captioner.caption(str(photo))
        assert explorer.locator("h1").inner_text() == caption.text
        assert "v1.2" in explorer.locator("body").inner_text()
        assert explorer.locator(".word .text").all_inner_texts() == caption.words
        assert explorer.locator(".hypothesis").count() == 1 + len(caption.alternatives)
        before = explorer.locator(".word[aria-current]").get_attribute("data-step")
        page.keyboard.press("ArrowRight")  # at once, without a click into the frame
        assert explorer.locator(".word[aria-current]").get_attribute("data-step") != before or len(caption.words) < 3
        assert page.get_by_test_id("image").locator("img").or_(page.locator(".image-frame img")).first.is_visible()
        explorer.locator(".word").last.hover()
        assert f"word {len(caption.words)} of" in explorer.locator(".details").inner_text()
        assert explorer.locator(".stage canvas").evaluate("(canvas) => canvas.width") >= 336
        explorer.locator(".matrix-box").evaluate("(box) => (box.open = true)")
        inside = explorer.locator("body").evaluate("() => document.documentElement.scrollHeight")
        page.wait_for_function("(height) => document.querySelector('.frame').offsetHeight === height", arg=inside)
        page.get_by_role("button", name=re.compile("clear|remove", re.IGNORECASE)).first.click()
        page.locator("iframe.frame").wait_for(state="detached")
    assert set(caption.words) <= set(WORDS)


@pytest.mark.slow
@pytest.mark.browser
def test_the_first_page_has_a_description_and_examples(page):
    page.get_by_role("heading", name="Describe a photo").wait_for()
    assert page.get_by_text("Drop a photo").inner_text().endswith("are fluent but wrong.")
    examples = page.locator("button.gallery-item")
    examples.nth(3).wait_for()
    assert examples.count() == 4
    examples.last.click()
    page.frame_locator("iframe.frame").locator("h2", has_text="cat.jpg").wait_for()


@pytest.mark.slow
@pytest.mark.browser
def test_a_file_that_is_no_photo_is_refused_in_one_line(page, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff<b>no photograph</b>")
    drop(page, broken)
    line = page.locator("[role=alert]", has_text=broken.name)
    line.wait_for()
    assert line.inner_text().startswith("broken.jpg: cannot be read as an image") and "\n" not in line.inner_text()
    assert page.locator("iframe.frame").count() == 0


@pytest.mark.slow
def test_a_port_in_use_is_one_line(extra, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        words = ["-m", "captioning", "app", "--model", str(checkpoint), "--port", port]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith(f"error: --host 127.0.0.1 --port {port}: Cannot find empty port")
