"""The history of a chat: what the server and the model have said, in the form that a chat template takes."""
