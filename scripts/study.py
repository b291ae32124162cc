#!/usr/bin/env python
"""`captioning study` for a clone of the repository. The options are the same."""

from captioning.cli.study import main

if __name__ == "__main__":
    main()
