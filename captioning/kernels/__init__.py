"""What makes training and search fast: fused kernels beside their plain formulas, and deferred gradients."""
