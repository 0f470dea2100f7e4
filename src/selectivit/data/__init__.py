"""Images in: readers and transforms."""
