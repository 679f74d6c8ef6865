"""What all routes share: the service, the engine's thread, requests under way, fairness, metrics, tracing."""
