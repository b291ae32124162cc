"""The subjects of ``scripts/benchmark.py``, and what they are compared with. Not part of the installed package."""
