"""The subjects of ``python -m benchmarks``, and what they are compared with. Not part of the installed package."""
