"""What ``scripts/benchmark.py`` measures, and what it compares with. Not part of the installed package."""
