"""How good captions are and where attention looks: an evaluator over batches, and its records."""

from captioning.evaluation.evaluator import evaluate_model
