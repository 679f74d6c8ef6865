"""HTTP itself: the process, the application, authentication, streams, errors and limits."""
