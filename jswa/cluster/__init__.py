"""Several hosts as one engine, and replicas behind Ray Serve."""
