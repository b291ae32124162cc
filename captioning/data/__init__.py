"""Data sets: readers that turn any of them into one compact index, samplers, transforms and the data module."""
