"""Show, Attend and Tell (Xu et al., ICML 2015) in PyTorch: soft and hard attention over image regions."""

__version__ = "0.1.0"
