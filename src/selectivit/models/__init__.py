"""Named models and their weights."""
