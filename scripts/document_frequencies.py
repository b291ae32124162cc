#!/usr/bin/env python
"""`captioning prepare frequencies` for a clone of the repository. The options are the same."""

from captioning.cli.frequencies import main

if __name__ == "__main__":
    main()
