#!/usr/bin/env python
"""`captioning bench` for a clone of the repository. The options are the same."""

from captioning.cli.bench import main

if __name__ == "__main__":
    main()
