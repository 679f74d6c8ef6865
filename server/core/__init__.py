"""The parts that all routes share: service, engine thread, requests in progress, fairness, metrics, tracing."""
