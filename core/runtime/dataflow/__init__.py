"""The dataflow of a chain: its channels, its operators, and the subtasks that run them."""
