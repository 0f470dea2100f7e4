"""Griffe extension: the section "Example:" of our docstrings is the Google style's "Examples:", and shows as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section in what is read; the code keeps its word."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object once it is loaded."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
