"""Hop 2: the caller's arrays become a problem, checked once, that a backend can run.

- `operands`: the kinds of array and the dtypes that are served
- `shapes`: what shapes mean, how batches broadcast, and how axes merge
- `fields`: the names of the arrays of each kind of problem
- `results`: the named results, `needs=` and `out=`
- `arrays`: a problem with its arrays by name, of whatever kind
- `product`: the products, forward and backward
- `forms`: the form of a call of an epilogue, and the formulas and products of its derivatives
- `fused`: the problems of epilogues of products and operands
- `folds`: a batch folded into the rows of a problem
- `jets`: first and second derivatives through a layer, and their backward
- `networks`: a network's jet in one kernel, and its backward
- `gates`: the gates and their derivatives, as epilogues of arrays
- `second_order`: the double backward and forward mode
"""
