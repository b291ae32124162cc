"""Metrics of captions: words and counts in, numbers, intervals and tests out."""
