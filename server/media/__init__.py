"""Images of requests: from the URLs in their parts to pictures."""
