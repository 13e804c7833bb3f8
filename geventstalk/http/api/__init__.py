"""The resources of the API, one module for each thing; each has `add(app, backend)`."""
