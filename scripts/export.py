#!/usr/bin/env python
"""`captioning export` for a clone of the repository. The options are the same."""

from captioning.cli.export import main

if __name__ == "__main__":
    main()
