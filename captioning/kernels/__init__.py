"""Fused kernels, each beside the plain formula that it must agree with."""
