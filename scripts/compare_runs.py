"""`captioning compare` from a clone: python scripts/compare_runs.py takes the same options."""

import sys

from captioning.__main__ import main

if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
