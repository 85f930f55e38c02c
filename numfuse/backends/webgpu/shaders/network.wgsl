// A network's jet, or its gradients: a workgroup takes tiles of points through all layers.
//
// A tile has a row for each member of each of its points, member by member: the values, then each
// direction's, then each second derivative's. Rows, like those of weights, are padded to $WIDTH columns,
// of which those that a layer lacks are 0. A step is one product with the weights of a layer: of a
// forward, then a pass over points in the place of the sums. A backward makes its points' forward
// again, and what it needs of it waits in the workgroup's part of `work`; then come the steps from
// the last layer to the first, each with a pass, the gradients of the weights, and a product with the
// transposed weights. Every loop that has a barrier in it is uniform.

$HEADER

const NONE = 0xffffffffu;

// The rows of the tile, and what they are multiplied with: slices of weights, or a layer's inputs.
var<workgroup> tile: array<vec4<f32>, $TILE_SIZE>;
var<workgroup> other: array<vec4<f32>, $OTHER_SIZE>;

$FORMULAS

//$ for i, forward, backward in POINTS:
// The point and the column of `tile[at][lane]`, whose members are `step` apart.
fn forward_$i(at: u32, lane: u32, step: u32, straight: u32) {
    $forward
}

//$ if BACKWARD:
// The sums are at `from_`, their members `from_step` apart.
fn backward_$i(at: u32, lane: u32, step: u32, from_: u32, from_step: u32, straight: u32) {
    $backward
}

//$ end
//$ end
// A pass over the tile's points in a layer of `n` columns: from their sums to their results, or
// `back` to the gradients by the sums, which are in `work` then.
fn pass_over(t: u32, f: u32, points: u32, n: u32, straight: u32, back: bool, sums: u32) {
    let wide = (n + 3u) / 4u;
    for (var e = t; e < points * wide; e += ${INVOCATIONS}u) {
        let at = e / wide * ${PITCH}u + e % wide;
        // Neighbours begin at other lanes: other banks of workgroup memory.
        for (var j = 0u; j < 4u; j++) {
            let lane = (j + (t >> 3u)) & 3u;
            if (e % wide * 4u + lane >= n) {
                continue;
            }
            switch (f) {
                //$ for i, forward, backward in POINTS:
                case ${i}u: {
                    //$ if BACKWARD:
                    if (back) {
                        backward_$i(at, lane, points * ${PITCH}u, sums + e, points * wide, straight);
                    } else {
                        forward_$i(at, lane, points * ${PITCH}u, straight);
                    }
                    //$ else:
                    forward_$i(at, lane, points * ${PITCH}u, straight);
                    //$ end
                }
                //$ end
                default: {}
            }
        }
    }
}

// Which of four columns there are.
fn inside(column: u32, n: u32) -> vec4<bool> {
    return vec4<u32>(column, column + 1u, column + 2u, column + 3u) < vec4<u32>(n);
}

//$ for a in READS:
// Four columns of `${a.name}`, 0 where there are fewer.
fn load_${a.name}(at: u32, column: u32, n: u32) -> vec4<f32> {
    var found = vec4<f32>();
    //$ for d in range(4):
    if (column + ${d}u < n) {
        found[$d] = f32(${a.name}[at + (column + ${d}u) * p.${a.name}_column]);
    }
    //$ end
    return found;
}

//$ end
@compute @workgroup_size($INVOCATIONS)
fn main(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
) {
    let number = group.x + group.y * grid.x;
    let tx = t % ${ACROSS}u;
    let ty = t / ${ACROSS}u;
    //$ if BACKWARD:
    let kept = p.kept + number * p.keeps;
    let plane = p.planes + number * p.plane;
    //$ end
    let first_tile = number * p.chunk;
    let last_tile = min(first_tile + p.chunk, p.tiles);
    for (var number_of_tile = first_tile; number_of_tile < last_tile; number_of_tile++) {
        let first = number_of_tile * p.points;
        let points = min(p.points, p.count - first);
        // The first layer's inputs: points, and directions, which are constants.
        workgroupBarrier();
        {
            let n = table[0];
            let wide = (n + 3u) / 4u;
            for (var e = t; e < points * wide; e += ${INVOCATIONS}u) {
                let row = e / wide;
                let column = e % wide;
                tile[row * ${PITCH}u + column] = load_x(p.x + (first + row) * p.x_row, column * 4u, n);
                //$ for d in range(D):
                {
                    var along = vec4<f32>();
                    for (var lane = 0u; lane < min(4u, n - column * 4u); lane++) {
                        along[lane] = bitcast<f32>(table[p.units + ${d}u * n + column * 4u + lane]);
                    }
                    tile[(${1 + d}u * points + row) * ${PITCH}u + column] = along;
                }
                //$ end
            }
        }
        workgroupBarrier();
        for (var step = 0u; step < p.steps; step++) {
            //$ if BACKWARD:
            let back = step >= p.made;
            let layer = select(step, p.layers - 1u - (step - p.made), back);
            //$ else:
            let layer = step;
            //$ end
            let words = layer * ${LAYER}u;
            let f = table[words + ${F}u];
            let rows = points * select(${1 + D + S}u, ${1 + D}u, layer == 0u);
            //$ if S:
            let straight = select(${S}u, 0u, layer == 0u);
            //$ else:
            let straight = 0u;
            //$ end
            var k = table[words + ${K}u];
            var n = table[words + ${N}u];
            var weights = table[words + ${W}u];
            //$ if BACKWARD:
            if (back) {
                if (layer + 1u == p.layers) {
                    // What the forward kept is read by other invocations than wrote it. The inputs of
                    // a last layer that is a product alone are in the tile yet.
                    storageBarrier();
                    if (layer >= p.made && p.by_weights != 0u) {
                        let high = (k + 3u) / 4u;
                        for (var e = t; e < rows * high; e += ${INVOCATIONS}u) {
                            let at = e / high * ${PITCH}u + e % high;
                            other[at] = tile[at];
                        }
                    }
                    workgroupBarrier();
                    let wide = (n + 3u) / 4u;
                    for (var e = t; e < points * wide; e += ${INVOCATIONS}u) {
                        let row = e / wide;
                        let column = e % wide;
                        //$ for a in GRADS:
                        //$ for i in range(a.number):
                        {
                            var found = vec4<f32>();
                            if ((p.given & ${a.bit}u) != 0u) {
                                found = load_${a.name}(p.${a.name} + ${i}u * p.${a.name}_member + (first + row) * p.${a.name}_row, column * 4u, n);
                            }
                            tile[(${a.first + i}u * points + row) * ${PITCH}u + column] = found;
                        }
                        //$ end
                        //$ end
                    }
                    workgroupBarrier();
                }
                if (f != 0u) {
                    pass_over(t, f, points, n, straight, true, kept + table[words + ${SUMS}u]);
                    workgroupBarrier();
                }
                if (p.by_weights != 0u) {
                    let high = (k + 3u) / 4u;
                    let wide = (n + 3u) / 4u;
                    let inputs = kept + table[words + ${INPUTS}u];
                    if (layer < p.made) {
                        for (var e = t; e < rows * high; e += ${INVOCATIONS}u) {
                            other[e / high * ${PITCH}u + e % high] = work[inputs + e];
                        }
                    }
                    workgroupBarrier();
                    let fresh = number_of_tile == first_tile;
                    let d_w = plane + table[words + ${D_W}u];
                    if (k > 4u && n > 4u) {
                        let dx = t % ${D_ACROSS}u;
                        let dy = t / ${D_ACROSS}u;
                        //$ for i, j in D_SUMS:
                        var d${i}_$j = vec4<f32>();
                        //$ end
                        //$ if D_IDLE:
                        if (dy < ${D_DOWN}u) {
                        //$ end
                        for (var row = 0u; row < rows; row++) {
                            //$ for i in range(D_HIGH):
                            let a$i = other[row * ${PITCH}u + ${i * D_DOWN}u + dy];
                            //$ end
                            //$ for j in range(D_WIDE):
                            let b$j = tile[row * ${PITCH}u + ${j * D_ACROSS}u + dx];
                            //$ end
                            //$ for i, j in D_SUMS:
                            d${i}_$j = fma(vec4<f32>(a${i // 4}[${i % 4}]), b$j, d${i}_$j);
                            //$ end
                        }
                        //$ for i, j in D_SUMS:
                        {
                            let row = (${i // 4 * D_DOWN}u + dy) * 4u + ${i % 4}u;
                            let column = ${j * D_ACROSS}u + dx;
                            if (row < k && column < wide) {
                                let at = d_w + row * wide + column;
                                var total = d${i}_$j;
                                if (!fresh) {
                                    total += work[at];
                                }
                                work[at] = total;
                            }
                        }
                        //$ end
                        //$ if D_IDLE:
                        }
                        //$ end
                    } else if (t < high * wide) {
                        // An invocation has a block of 4 x 4.
                        let a = t / wide;
                        let column = t % wide;
                        //$ for i in range(4):
                        var d$i = vec4<f32>();
                        //$ end
                        for (var row = 0u; row < rows; row++) {
                            let x = other[row * ${PITCH}u + a];
                            let y = tile[row * ${PITCH}u + column];
                            //$ for i in range(4):
                            d$i = fma(vec4<f32>(x[$i]), y, d$i);
                            //$ end
                        }
                        //$ for i in range(4):
                        if (a * 4u + ${i}u < k) {
                            let at = d_w + (a * 4u + ${i}u) * wide + column;
                            if (!fresh) {
                                d$i += work[at];
                            }
                            work[at] = d$i;
                        }
                        //$ end
                    }
                    if (t < wide) {
                        let at = plane + table[words + ${D_BIAS}u] + t;
                        var total = vec4<f32>();
                        for (var row = 0u; row < points; row++) {
                            total += tile[row * ${PITCH}u + t];
                        }
                        if (!fresh) {
                            total += work[at];
                        }
                        work[at] = total;
                    }
                }
                if (layer == 0u && p.by_x == 0u) {
                    break;
                }
                let length = k;
                k = n;
                n = length;
                weights = table[words + ${TURNED}u];
            } else if (p.by_weights != 0u) {
                let high = (k + 3u) / 4u;
                let inputs = kept + table[words + ${INPUTS}u];
                for (var e = t; e < rows * high; e += ${INVOCATIONS}u) {
                    work[inputs + e] = tile[e / high * ${PITCH}u + e % high];
                }
            }
            //$ end

            // The product of the tile's rows and the weights, slice by slice.
            let wide = (n + 3u) / 4u;
            let deep = (k + 3u) / 4u * 4u;
            //$ for i, j in PRODUCTS:
            var c${i}_$j = vec4<f32>();
            //$ end
            //$ for i in range(THIN):
            var h$i = vec4<f32>();
            //$ end
            for (var k0 = 0u; k0 < deep; k0 += ${SLICE}u) {
                let depth = min(${SLICE}u, deep - k0);
                workgroupBarrier();
                for (var e = t; e < depth * ${WIDTH // 4}u; e += ${INVOCATIONS}u) {
                    let column = e % ${WIDTH // 4}u;
                    if (column < wide) {
                        other[e / ${WIDTH // 4}u * ${PITCH}u + column] = packed[weights + k0 * ${WIDTH // 4}u + e];
                    }
                }
                workgroupBarrier();
                if (wide > 1u) {
                    for (var q = 0u; q < depth / 4u; q++) {
                        //$ for i in range(MR):
                        let a$i = tile[(${i * DOWN}u + ty) * ${PITCH}u + k0 / 4u + q];
                        //$ end
                        //$ for d in range(4):
                        {
                            //$ for j in range(RUNS):
                            let b$j = other[(q * 4u + ${d}u) * ${PITCH}u + ${j * ACROSS}u + tx];
                            //$ end
                            //$ for i, j in PRODUCTS:
                            c${i}_$j = fma(vec4<f32>(a$i[$d]), b$j, c${i}_$j);
                            //$ end
                        }
                        //$ end
                    }
                } else {
                    // Of a few columns an invocation has whole rows.
                    for (var q = 0u; q < depth / 4u; q++) {
                        //$ for d in range(4):
                        let b$d = other[(q * 4u + ${d}u) * ${PITCH}u];
                        //$ end
                        //$ for i in range(THIN):
                        $IF_ROW
                        let a$i = tile[(t + ${i * INVOCATIONS}u) * ${PITCH}u + k0 / 4u + q];
                        //$ for d in range(4):
                        h$i = fma(vec4<f32>(a$i[$d]), b$d, h$i);
                        //$ end
                        $END_ROW
                        //$ end
                    }
                }
            }
            // No invocation reads the tile any more. What is no row or column of this layer is 0.
            workgroupBarrier();
            let bias = table[words + ${BIAS}u];
            //$ if BACKWARD:
            let biased = bias != NONE && !back;
            let keep = kept + table[words + ${SUMS}u];
            //$ else:
            let biased = bias != NONE;
            //$ end
            if (wide > 1u) {
                //$ for j in range(RUNS):
                {
                    let column = ${j * ACROSS}u + tx;
                    let there = inside(column * 4u, n);
                    var more = vec4<f32>();
                    if (biased) {
                        more = packed[bias + column];
                    }
                    //$ for i in range(MR):
                    {
                        let row = ${i * DOWN}u + ty;
                        var total = c${i}_$j;
                        if (biased && row < points) {
                            total += more;
                        }
                        total = select(vec4<f32>(), total, there & vec4<bool>(row < rows));
                        tile[row * ${PITCH}u + column] = total;
                        //$ if BACKWARD:
                        if (!back && column < wide && row < rows) {
                            work[keep + row * wide + column] = total;
                        }
                        //$ end
                    }
                    //$ end
                }
                //$ end
            } else {
                //$ for i in range(THIN):
                {
                    let row = t + ${i * INVOCATIONS}u;
                    $IF_ROW
                    var total = h$i;
                    if (biased && row < points) {
                        total += packed[bias];
                    }
                    total = select(vec4<f32>(), total, inside(0u, n) & vec4<bool>(row < rows));
                    tile[row * ${PITCH}u] = total;
                    //$ if BACKWARD:
                    if (!back && row < rows) {
                        work[keep + row] = total;
                    }
                    //$ end
                    $END_ROW
                }
                //$ end
            }
            workgroupBarrier();
            //$ if BACKWARD:
            let passes = f != 0u && !back && layer + 1u < p.layers;
            //$ else:
            let passes = f != 0u;
            //$ end
            if (passes) {
                pass_over(t, f, points, n, straight, false, 0u);
                workgroupBarrier();
            }
        }
        // The results of this tile.
        //$ if BACKWARD:
        if (p.by_x != 0u) {
            let n = table[0];
            for (var e = t; e < points * n; e += ${INVOCATIONS}u) {
                let row = e / n;
                let column = e % n;
                d_x[p.d_x + (first + row) * p.d_x_row + column * p.d_x_column] = ${GIVE}(tile[row * ${PITCH}u + column / 4u][column % 4u]);
            }
        }
        //$ else:
        let n = p.outputs;
        for (var e = t; e < points * n; e += ${INVOCATIONS}u) {
            let row = e / n;
            let column = e % n;
            //$ for a in OUTS:
            //$ for i in range(a.number):
            ${a.name}[p.${a.name} + ${i}u * p.${a.name}_member + (first + row) * p.${a.name}_row + column * p.${a.name}_column] = ${GIVE}(tile[(${a.first + i}u * points + row) * ${PITCH}u + column / 4u][column % 4u]);
            //$ end
            //$ end
        }
        //$ end
    }
}
