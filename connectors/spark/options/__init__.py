"""Options of the formats, as tables: names, parsing, errors and documents come of them.

Most options are not declared here. They are fields of the classes that pipelines use, which carry
`option(…, spark="name")` as metadata (`core.spi.options`); the head of each module names them.
"""
