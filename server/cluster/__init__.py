"""The same application on several replicas."""
