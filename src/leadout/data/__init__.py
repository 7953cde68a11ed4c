"""Stage data: rows -> `Prompt`: sources, templates, order."""
