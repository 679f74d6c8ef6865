"""What the words of a command line mean: models, options in groups, sizes, and options of other engines."""
