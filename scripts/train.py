"""`captioning fit` from a clone: python scripts/train.py takes the same options."""

import sys

from captioning.__main__ import main

if __name__ == "__main__":
    main(["fit", *sys.argv[1:]])
