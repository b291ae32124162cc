"""Pictures of attention: figures, and pages to explore and compare."""
