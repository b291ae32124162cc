#!/usr/bin/env python
"""`captioning caption` for a clone of the repository. The options are the same."""

from captioning.cli.caption import main

if __name__ == "__main__":
    main()
