"""`jswa chat`: typed lines become messages of a conversation, a model answers it, and the screen shows the pieces."""
