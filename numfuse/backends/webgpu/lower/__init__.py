"""Hop 4: a problem becomes dispatches.

- `places`: the batch of a product, and how its sums are cut
- `products`: a product with an epilogue over all places
- `sums`: planes, rows and broadcast axes that are added up
- `elementwise`: an epilogue of arrays alone
- `layers`: a layer and its derivatives
- `fused`: any epilogue of sums and operands: gates, the gated layer, a user's own
- `jets`: a layer's jet
- `networks`: all layers of a network at once
"""
