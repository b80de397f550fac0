"""Options of the formats, as tables: names, parsing, errors and documents come of them."""
