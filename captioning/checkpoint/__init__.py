"""Files that hold a model: their format, their checksums, and the folder to pass on. Nothing that runs code."""
