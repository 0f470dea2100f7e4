"""The training-free swap: one verb, one file a host library."""
