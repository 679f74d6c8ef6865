"""How the matrices of a checkpoint are read in the forms of `jswa.forms`; `table` lists them."""
