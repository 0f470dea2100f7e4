"""What a model costs and what it is worth."""
