#!/usr/bin/env python
"""`captioning average` for a clone of the repository. The options are the same."""

from captioning.cli.average import main

if __name__ == "__main__":
    main()
