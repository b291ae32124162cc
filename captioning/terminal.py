"""The argument parser that all scripts share."""

from __future__ import annotations

import argparse


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring: what it does, then the options, then its ``examples:``.

    Options cannot be abbreviated, so that adding one never changes what a command line means.
    """
    description, _, examples = (doc or "").partition("\n\nexamples:")
    return argparse.ArgumentParser(
        description=description,
        epilog=f"examples:{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
