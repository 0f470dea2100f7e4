"""Pictures of features and attention."""
