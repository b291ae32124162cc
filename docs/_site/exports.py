"""Documents the names that a package imports from its modules as names of the package."""

from typing import Any

import griffe


class Exports(griffe.Extension):
    """Lists the classes and functions that ``captioning/ROOM/__init__.py`` imports, so that it needs no ``__all__``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for room in pkg.modules.values():
            if room.is_init_module and room.exports is None:
                names = [name for name, member in room.members.items() if member.is_alias and name[0] != "_"]
                room.exports = [name for name in names if room.members[name].target_path.startswith(pkg.name)]
