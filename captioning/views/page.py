"""HTML from Jinja templates, which lie beside the code that fills them; page.html is the frame of every page."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **content: Any) -> str:
    """Return a template filled in. Values become text: only a template that says ``| safe`` lets HTML through.

    Args:
        template: its path in this package, such as "views/page.html".
        content: by name, every value that the template uses; it calls ``asset("views/page.css")`` for a file as it is.
    """
    return _environment().get_template(template).render(content)


@cache
def _environment() -> Environment:
    loader = PackageLoader("captioning", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["asset"] = lambda path: loader.get_source(environment, path)[0]
    # `tojson` escapes what could end the <script> that the JSON stands in.
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "separators": (",", ":"),
        "allow_nan": False,
    }
    return environment
