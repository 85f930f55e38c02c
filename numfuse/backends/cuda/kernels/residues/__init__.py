"""float64 products by integers of 8 bits: residues of both factors, and of what they sum up to.

Ozaki's second scheme (Ozaki, Uchino, Imamura, arXiv 2504.08009; Uchino, Ozaki, Imamura, arXiv
2508.03984): rows of X and columns of Y are scaled by powers of two and rounded to integers, of
which a product is computed exactly, modulo as many small coprime numbers as it takes.

- (`numfuse.moduli`: the moduli, and how many of them give which error)
- `tier`: which products run here, and the launches of one
- `split`: scales of rows, and residues of a factor as rows along K, whatever its layout is
- `gemm`: the plain loop over residues, for the simulator; `warps`: by mma.sync, before Hopper,
  which has a kernel of its own (`hopper`); `store`: how the sums of both leave a thread
- `finish`: the integer of the residues (Chinese remainder theorem), its scale, and the epilogue
"""
