"""The HTTP layer: the process, the application, authentication, streams, errors and limits."""
