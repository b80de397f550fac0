"""What a chain does with rows and barriers: channels, operators and the subtasks that run them."""
