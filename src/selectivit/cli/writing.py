"""Files that are there whole or not at all; they live beside the readers, since training writes too."""

from selectivit.data.writing import WriteError, check_writable, write_atomic, write_json

__all__ = ["WriteError", "check_writable", "write_atomic", "write_json"]
