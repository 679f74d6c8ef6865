"""The engine as the routes use it, in their own process or in another one."""
