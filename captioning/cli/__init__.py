"""The `captioning` command: what it says before anything slow is imported, and the Lightning command line."""
