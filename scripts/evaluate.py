#!/usr/bin/env python
"""`captioning evaluate` for a clone of the repository. The options are the same."""

from captioning.cli.evaluate import main

if __name__ == "__main__":
    main()
