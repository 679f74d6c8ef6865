"""Running the steps of an engine: one after the other, until it pauses, sleeps or changes its weights."""
