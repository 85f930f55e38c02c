"""Weights of a network as images of their bfloat16 parts: see `kernels.network_parts`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of
from numfuse.backends.cuda.kernels import network_copies, network_part_sums, network_parts
from numfuse.backends.cuda.kernels.network_tiles import Tile
from numfuse.backends.cuda.plan.network_sizes import Sizes
from numfuse.backends.cuda.plan.network_slots import Slots
from numfuse.backends.cuda.plan.product import Launch, Slot

if TYPE_CHECKING:
    from numfuse.backends.cuda.plan.program import Recorder


def image_bindings(found: dict[str, Any], tile: Tile, backward: bool) -> dict[str, Any]:
    """Return what the products of weights that come as images are bound to."""
    made: dict[str, Any] = {"TURNED": False, "IMAGES": 1 + backward}
    steps = -(-found["POINTS"] // (found["AT_ONCE"] * found["PARTS"]))
    made["SHARE"] = -(-steps // (tile.width // tile.slice))
    ring = found | made | {"COPY_FEW": network_copies.copy(tile, tile.few)}
    parts = network_parts
    for back, name in ((0, ""), (1, "_BACK")):
        made[f"OPEN{name}"] = inlined(parts.open_images, **ring, BACK=back)
    made["STREAM"] = inlined(parts.multiply_images, **ring)
    made["MULTIPLY_BESIDE"] = inlined(parts.multiply_beside, **ring)
    made["ADD_ROWS"] = inlined(parts.add_rows, **ring)
    made["WRITE_PARTS"] = inlined(parts.write_parts, **ring)
    made["CLEAR_PARTS"] = inlined(parts.clear_parts, **ring)
    made["PART_PLACE"] = inlined(parts.part_place, **ring)
    return made | {"PLACE": types.int32}


def split_weights(
    rec: Recorder, s: Sizes, bindings: dict[str, Any], slots: Slots, given: dict[str, Any],
    places: int,
) -> dict[str, Any]:  # fmt: skip
    """Record the launch that splits weights; return layers whose weights are their images."""
    inner, images, threads = s.count - 2, bindings["IMAGES"], 256
    each = network_part_sums.image_bytes(s.tile) * images
    made = rec.fresh((places, inner * each // 4), "float32")
    image = slots.slot("images", made)
    own = bindings | {"THREADS": threads}
    name = f"network weights {s.tile.width} {s.tile.tensor}"
    kernel = kernel_of(
        network_parts.split_weights, network_parts.SPLIT, own, threads=threads, name=name
    )
    layers, steps = given["layers"], given["steps"]
    arguments = network_parts.SPLIT(
        layers=layers, steps=steps, images=image, network_step=inner * each
    )
    grid = inner * images * s.tile.width**2 // (2 * threads), places, 1
    rec.launches((Launch(kernel, grid, arguments),), slots.at, ahead=True)
    whole = {}
    for i in range(1, s.count - 1):
        weights = Slot("images", (i - 1) * each)
        whole[f"l{i}"] = replace(getattr(layers, f"l{i}"), weights=weights)
    apart = {f"weights_{i}": inner * each // 4 for i in range(1, s.count - 1)}
    return {"layers": replace(layers, **whole), "steps": replace(steps, **apart)}
