"""`jswa bench serve`: an HTTP load generator for any OpenAI-compatible server, and its report."""
