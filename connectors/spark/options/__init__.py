"""The options of the formats, as tables for names, parsing, errors and documents.

Most options are not declared here. They are fields of the classes that pipelines use, with
`option(…, spark="name")` as metadata (`core.spi.options`). The head of each module names these
classes.
"""
