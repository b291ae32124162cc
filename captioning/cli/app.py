"""The command ``app``: a page in the browser that captions photos."""

from __future__ import annotations

import html
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioning.cli import model_name
from captioning.errors import InputError, one_line, printable
from captioning.files import read_json

if TYPE_CHECKING:
    from captioning.inference import ImageCaptioner

_STYLE = """
h1 { font-family: system-ui, sans-serif; }
.frame { display: block; width: 100%; border: 0; }
footer { display: none !important; }
"""
# The frame is as high as its content and has the focus, for arrow keys. --screen is the height of this window.
_ON_LOAD = """
const { body, documentElement: page } = this.contentDocument;
page.style.setProperty("--screen", innerHeight + "px");
new ResizeObserver(() => (this.style.height = body.offsetHeight + "px")).observe(body);
this.contentWindow.focus({ preventScroll: true });
"""


def app(*, model: str = "pretrained", host: str = "127.0.0.1", port: int = 7860) -> None:
    """Caption photos on a page in the browser: drop a photo, see its words and where the model looked.

    The command needs an extra: pip install -e '.[app]'. Only this machine can open the page, unless
    --host names another address. Photos stay on the machine that serves the page.

    Args:
        model: A FILE.ckpt, exported folder, hf:owner/name or pretrained.
        host: Address to serve on; only this machine can open the default.
        port: Port to serve on.

    Examples:
        captioning app                     (then open http://127.0.0.1:7860)
        captioning app --model runs/demo/soft/checkpoints/best.ckpt
        captioning app --host 0.0.0.0      (for everybody who can reach this machine)
    """
    if importlib.util.find_spec("gradio") is None:
        raise InputError("captioning app needs gradio: pip install -e '.[app]'")
    print(f"captioning app: loading {printable(model)} ...", file=sys.stderr, flush=True)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio sends usage data on import
    import gradio

    from captioning.checkpoint.load import PRETRAINED_FOLDER
    from captioning.inference import load

    captioner, name = load(model), model_name(model)
    folder = PRETRAINED_FOLDER.parent / "examples"
    examples = [example for example in read_json(folder / "examples.json") if example["app"]]
    sources = " · ".join(f"[{example['file']}: {example['credit']}]({example['source']})" for example in examples)
    with gradio.Blocks(title="Captions", analytics_enabled=False, delete_cache=(600, 600)) as page:  # seconds
        gradio.Markdown(
            "# Describe a photo\nDrop a photo: the model describes it, and shows where it looked at each word. "
            "For images unlike those of its training, captions are fluent but wrong."
        )
        with gradio.Row():
            photo: Any = gradio.Image(label="Photo", height=220, sources=["upload", "clipboard"], buttons=[])
            with gradio.Column():
                files = [[str(folder / example["file"])] for example in examples]
                gallery = gradio.Dataset(components=[photo], samples=files, label="Examples, the last one difficult")
                gradio.Markdown(f"<small>{sources}</small>")
        # Without this, gradio would decode the upload and report a damaged file in its own words.
        photo.preprocess = lambda upload: upload and upload.path
        gallery.click(lambda example: example[0], gallery, photo, api_visibility="private")
        result = gradio.HTML(padding=False)
        photo.change(lambda path: _answer(captioner, name, path), photo, result, api_visibility="private")
    server: dict[str, Any] = {"server_name": host, "server_port": port, "allowed_paths": [str(folder)]}
    try:
        page.launch(**server, prevent_thread_lock=True, quiet=True, ssr_mode=False, run_history=False, css=_STYLE)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: {one_line(error)}") from error
    print(f"captioning app: {page.local_url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    page.block_thread()


def _answer(captioner: ImageCaptioner[Any], name: str, path: str | None) -> str:
    """Return HTML: the explorer of the photo, or one line with the error."""
    from captioning.views.explorer import explorer_page

    if path is None:
        return ""
    try:
        caption = captioner.caption(path)
    except InputError as error:
        return f'<p role="alert">{html.escape(printable(str(error).replace(path, Path(path).name)))}</p>'
    page = explorer_page([caption.explorer_image(name)], caption.text)
    # A frame of its own keeps the explorer's style, keys and policy apart from the page around it.
    frame = '<iframe class="frame" title="Caption and attention" onload="{}" srcdoc="{}"></iframe>'
    return frame.format(html.escape(_ON_LOAD), html.escape(page))
