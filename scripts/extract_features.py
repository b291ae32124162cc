#!/usr/bin/env python
"""`captioning extract` for a clone of the repository. The options are the same."""

from captioning.cli.extract import main

if __name__ == "__main__":
    main()
