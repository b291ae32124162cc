"""Caption photographs on a page in the browser: drop one, see its words and where the model looked.

The command needs an extra: pip install -e '.[app]'. Only this machine can open the page, unless
--host says otherwise, and photographs stay on the machine that serves it.

examples:
  captioning app
  captioning app --model runs/demo/soft/checkpoints/best.ckpt
  captioning app --model exported/ --port 8000
  captioning app --host 0.0.0.0      (for everybody who can reach this machine)
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioning.cli.arguments import add_model_option, script_parser, whole_number
from captioning.errors import InputError, exits_on_input_error, printable

if TYPE_CHECKING:
    from gradio import Blocks

    from captioning.inference import ImageCaptioner

_KEPT = 600  # seconds for which an uploaded photograph is kept
_STYLE = """
.frame { width: 100%; height: 88vh; border: 0; }
.refused { font-size: 1.1em; }
footer { display: none !important; }
"""


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "app")
    add_model_option(parser, default="pretrained")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="address (default: 127.0.0.1, this machine)"
    )
    parser.add_argument("--port", type=whole_number(1, 65535), default=7860, metavar="N", help="port (default: 7860)")
    return parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    if importlib.util.find_spec("gradio") is None:
        raise InputError("captioning app needs gradio: pip install -e '.[app]'")
    _check_address(arguments.host, arguments.port)
    print(f"captioning app: loading {printable(arguments.model)} ...", file=sys.stderr, flush=True)

    from captioning.inference import load

    app = serve(load(arguments.model), Path(arguments.model).stem, arguments.host, arguments.port)
    print(f"captioning app: {app.local_url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    app.block_thread()


def serve(captioner: ImageCaptioner[Any], name: str, host: str, port: int) -> Blocks:
    """Start to serve the page in threads of its own; ``close()`` of what is returned ends that.

    Args:
        captioner: Captions the photographs, with its own decoding options.
        name: The model's name on the page.
        host: Address to serve on.
        port: Port to serve on.

    Raises:
        InputError: The address cannot be served on.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # for what gradio sends when it is imported
    import gradio

    with gradio.Blocks(title="Captions", analytics_enabled=False, delete_cache=(_KEPT, _KEPT)) as app:
        photo = gradio.File(label="Photograph", height=140)
        result = gradio.HTML(padding=False)
        photo.change(lambda path: _answer(captioner, name, path), photo, result, api_visibility="private")
    try:
        app.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=False,
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            run_history=False,
            footer_links=[],
            css=_STYLE,
        )
    except OSError as error:  # gradio's own, without an errno
        raise _refusal(host, port) from error
    return app


def _check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be served on; gradio's thread would end with a traceback for some.

    Raises:
        InputError: ``host`` is no address of this machine, or the port is in use.
    """
    try:
        name = host.removeprefix("[").removesuffix("]")
        places = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a ValueError for what cannot be a name
        raise _refusal(host, port) from error
    if not any(_can_serve(family, address) for family, _, _, _, address in places):
        raise _refusal(host, port)


def _can_serve(family: socket.AddressFamily, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gradio, beside connections that end
            probe.bind(address)
    except (OSError, OverflowError):
        return False
    return True


def _refusal(host: str, port: int) -> InputError:
    return InputError(
        f"--host {host} --port {port}: cannot be served on; give an address of this machine and a free port"
    )


def _answer(captioner: ImageCaptioner[Any], name: str, path: str | None) -> str:
    """Return HTML: the explorer of the photograph at ``path``, or one line that says why there is none."""
    from captioning.views.explorer import ExploredImage, explorer_page

    if path is None:
        return ""
    file = Path(path).name
    try:
        caption = captioner.caption(path)
    except InputError as error:
        line = printable(str(error).replace(path, file))
        return f'<p class="refused" role="alert">{html.escape(line)}</p>'
    page = explorer_page([ExploredImage(caption.view, file, [caption.for_explorer(name)])], caption.text)
    # A frame of its own keeps the explorer's style, keys and policy apart from the page around it.
    frame = '<iframe class="frame" title="Caption and attention" sandbox="allow-scripts" srcdoc="{}"></iframe>'
    return frame.format(html.escape(page))
