"""What users build with: pipelines, streams, windows, functions, and the graph they make."""
