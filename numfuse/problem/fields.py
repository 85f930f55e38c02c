"""The names of the arrays of each kind of problem: its inputs, and what it writes."""

from __future__ import annotations

_FORWARD = ("a", "b", "bias", "residual")
_BACKWARD = ("grad", "a", "b", "bias", "pre")
_GRADIENTS = ("d_a", "d_b", "d_bias", "d_residual")

#: {kind, as the method of a backend: (inputs, outputs)}
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "forward": (_FORWARD, ("out", "pre")),
    "backward": (_BACKWARD, _GRADIENTS),
    "gated": (("a", "b"), ("out",)),
    "gated_backward": (("grad", "a", "b"), ("d_a", "d_b")),
    "double_backward": ((*_BACKWARD, "u", "v", "w", "z"), ("d_grad", *_GRADIENTS)),
    "tangent": ((*_FORWARD, "u", "v", "w", "z"), ("out", "out_dot")),
    "gated_double_backward": (("grad", "a", "b", "u", "v"), ("d_grad", "d_a", "d_b")),
    "gated_tangent": (("a", "b", "u", "v"), ("out", "out_dot")),
}
#: The fields of operands that have another name in the public functions.
FIELD_OF = {
    "pre_activation": "pre",
    "a_dot": "u",
    "b_dot": "v",
    "bias_dot": "w",
    "residual_dot": "z",
}
