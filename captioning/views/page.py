"""HTML from Jinja templates, each beside the code that fills it; page.html is the frame of every page."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **content: Any) -> str:
    """Return a filled template. Values are escaped unless the template says ``| safe``.

    Args:
        template: Path in this package, such as "views/page.html".
        content: Every value that the template uses, by name. ``asset("views/page.css")`` inserts a file unchanged.
    """
    return _environment().get_template(template).render(content)


@cache
def _environment() -> Environment:
    loader = PackageLoader("captioning", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["asset"] = lambda path: loader.get_source(environment, path)[0]
    # `tojson` escapes anything that could end the <script> around the JSON.
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "separators": (",", ":"),
        "allow_nan": False,
    }
    return environment
