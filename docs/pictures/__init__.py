"""The pictures of the documents, drawn as SVG files: `python -m docs.pictures`."""
