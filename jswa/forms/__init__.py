"""The forms in which matrices are held: the names and sizes of their arrays, their layouts, and how they multiply.

table     the one list of forms; each has a module of its name
matrix    what the model asks of a matrix
layouts   matrices as the products of a backend read them, once they are loaded
base/     what a form is, and what several share

A form's numbers, products and kernels are in `pallas_kernels`; how a checkpoint's tensors become its arrays is in
`jswa.model.weights.packed`.
"""
