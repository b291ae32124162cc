"""The world behind the shapes data set: ``scene`` samples and describes it, ``drawing`` paints pixels and masks."""
