"""Build hook of the reference: a docstring's "Example:" is read as the section that griffe calls "Examples:"."""

from __future__ import annotations

import re

from griffe import Extension


class Examples(Extension):
    """Sets the doctests of docstrings as code."""

    def on_instance(self, *, obj, **_):
        """Rename the section's title before the docstring is parsed."""
        if not obj.is_alias and obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
