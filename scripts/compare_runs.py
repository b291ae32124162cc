#!/usr/bin/env python
"""`captioning compare` for a clone of the repository. The options are the same."""

from captioning.cli.compare import main

if __name__ == "__main__":
    main()
