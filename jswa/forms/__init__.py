"""The forms in which matrices are held: their names among the parameters, and how products read them."""
