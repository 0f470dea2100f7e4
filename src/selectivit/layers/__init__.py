"""One module a file."""
