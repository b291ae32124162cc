"""HTML from Jinja templates, which lie beside the code that fills them; page.html is the frame of every page."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_LOADER = PackageLoader("captioning", "")
_PAGES = Environment(loader=_LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_PAGES.globals["asset"] = lambda path: _LOADER.get_source(_PAGES, path)[0]
# `tojson` escapes anything that could end the <script> around the JSON.
_PAGES.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}


def render(template: str, **content: Any) -> str:
    """Return a template of this package, such as "views/page.html", filled with ``content``.

    Values are escaped unless the template says ``| safe``. ``asset("views/page.css")`` inserts a file unchanged.
    """
    return _PAGES.get_template(template).render(content)
