"""`captioning caption` from a clone: python scripts/caption_image.py takes the same options."""

import sys

from captioning.__main__ import main

if __name__ == "__main__":
    main(["caption", *sys.argv[1:]])
