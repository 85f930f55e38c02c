"""The shader contract: WGSL modules of others as a backend.

- `entry_points`: the contract as data
- `source`, `nesting`: a module's entry points and bindings, and how deep it nests
- `backend`, `run`, `grouping`: the backend that runs a module, and a problem as its passes
- `check`: a module beside the reference backend
"""
