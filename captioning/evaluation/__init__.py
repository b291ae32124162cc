"""How good captions are and where attention looks: an evaluator over batches, its records, and the metrics."""
