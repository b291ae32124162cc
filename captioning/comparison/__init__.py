"""Runs side by side: what they say about the same images, with what certainty, and where they look."""
