"""Runs compared on the same images: captions with their uncertainty, attention, curves and settings."""
