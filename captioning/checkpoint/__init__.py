"""Files that hold a model: reading, writing, exporting and averaging them. Opening one runs none of its code."""
