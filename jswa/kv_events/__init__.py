"""Events about cached KV for routers, in vLLM's form: which blocks of tokens have come into the cache and left it."""
