"""The vision tower of Gemma 4 E2B and E4B: images to soft tokens, which take the place of embeddings in a prompt.

config      what config.json says of the tower, or why jswa does not serve it
gemma4      the tower
weights     its parameters, from the files of a checkpoint
encoder     the tower as an engine holds it: compiled once, with a cache of the images that it has encoded
"""
