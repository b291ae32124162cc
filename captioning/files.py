"""Files that a crash cannot leave half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, *, indent: int | None = 1) -> None:
    """Write JSON through a temporary name, so that a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
    os.replace(temporary, path)
