"""What is computed faster than PyTorch does it, each beside the plain formula it must agree with."""
