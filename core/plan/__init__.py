"""The plan of a job: its graph, functions, windows and event time, as the runtime reads them."""
