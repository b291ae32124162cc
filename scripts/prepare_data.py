#!/usr/bin/env python
"""`captioning prepare` for a clone of the repository. The options are the same."""

from captioning.cli.prepare import main

if __name__ == "__main__":
    main()
