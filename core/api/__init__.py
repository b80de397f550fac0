"""The API that users build jobs with: pipelines, streams, windows, functions, and their graph."""
