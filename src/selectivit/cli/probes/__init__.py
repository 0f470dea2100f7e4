"""The kinds of `selectivit probe`, one file each."""
