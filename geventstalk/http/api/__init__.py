"""The resources of the API, one module for each thing. `add(app, backend)` of each gives its resources their routes."""
