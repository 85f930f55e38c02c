// A network's jet, or its gradients: a workgroup takes tiles of points through all layers.
//
// A tile has a row for each member of each of its points, member by member: $POINTS values, as many
// of each direction, and of each second derivative; $WIDTH columns each, of which those that a layer
// lacks are 0, and so are the rows of points that there are not. A layer is a product of the tile
// and its weights, and a pass over points in the place of the sums. A backward makes its points'
// forward again, and what it needs of it waits in the workgroup's part of `work`; then come the
// layers from the last to the first, each with a pass, the gradients of the weights, and a product
// with the transposed weights. Every loop that has a barrier in it is uniform.
//
// Copies and passes are written out: what is read is read before the first of it is stored, since a
// compiler keeps the order of a load behind a store that may be to the same place.

$HEADER

const NONE = 0xffffffffu;
const NO = vec4<f32>();

// The rows of the tile, and what they are multiplied with: weights, or a layer's inputs.
var<workgroup> tile: array<vec4<f32>, ${ROWS * FOURS}>;
//$ if OTHER_ROWS:
var<workgroup> other: array<vec4<f32>, ${OTHER_ROWS * FOURS}>;
//$ end
//$ if APART:
var<workgroup> matrix: array<vec4<f32>, ${SLICE * FOURS}>;
//$ end

// Where the tile has four columns of a row. The fours of eight rows are in eight orders, so that
// invocations that read one four of as many rows find it in as many banks.
fn place(row: u32, four: u32) -> u32 {
    return row * ${FOURS}u + (four ^ (row & 7u));
}

// Which of four columns there are.
fn inside(four: u32, n: u32) -> vec4<bool> {
    return vec4<u32>(four * 4u) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(n);
}

// Whether a row is of a point that there is. (Weights may be infinite: 0 times them is no 0.)
fn exists(row: u32, points: u32) -> bool {
    return points == ${POINTS}u || row % ${POINTS}u < points;
}

//$ for a in READS:
// Four columns of `${a.name}`, 0 where there are fewer.
fn load_${a.name}(at: u32, four: u32, n: u32) -> vec4<f32> {
    let first = at + four * 4u * p.${a.name}_column;
    var found = NO;
    //$ for l in range(4):
    if (four * 4u + ${l}u < n) {
        found[$l] = f32(${a.name}[first + ${l}u * p.${a.name}_column]);
    }
    //$ end
    return found;
}

//$ end
// Four columns of a row of the first layer's inputs: points, and directions, which are constants.
fn input(row: u32, four: u32, n: u32, first: u32, points: u32) -> vec4<f32> {
    let member = row / ${POINTS}u;
    let point = row % ${POINTS}u;
    if (point >= points || member > ${D}u) {
        return NO;
    }
    //$ if D:
    if (member > 0u) {
        return bitcast<vec4<f32>>(table[p.units + (member - 1u) * ((n + 3u) / 4u) + four]);
    }
    //$ end
    return load_x(p.x + (first + point) * p.x_row, four, n);
}

// --- passes over the tile's points ----------------------------------------------------------------
$FORMULAS

$PASSES
//$ if BACKWARD:
// What a layer without an activation hands on.
fn keep(t: u32, points: u32, n: u32, inputs: u32) {
    let four = t % ${FOURS}u;
    if (four * 4u >= n) {
        return;
    }
    for (var row = t / ${FOURS}u; row < ${MEMBERS * POINTS}u; row += ${INVOCATIONS // FOURS}u) {
        work[inputs + row * ${FOURS}u + four] = select(NO, tile[place(row, four)], row % ${POINTS}u < points);
    }
}

//$ end
// --- products ------------------------------------------------------------------------------------
// Rows of weights to workgroup memory, with `few` the first four alone. (The first of a layer's
// may be brought while the tile is written.)
fn fetch(t: u32, first: u32, few: bool) {
    if (few) {
        for (var e = t; e < ${4 * FOURS}u; e += ${INVOCATIONS}u) {
            ${MATRIX}[e] = packed[first + e];
        }
        return;
    }
    //$ for i in range(FETCHES):
    let w$i = packed[first + t + ${i * INVOCATIONS}u];
    //$ end
    //$ for i in range(FETCHES):
    ${MATRIX}[t + ${i * INVOCATIONS}u] = w$i;
    //$ end
}

// The tile times `k` rows of weights, of which the first slice is in `$MATRIX`, in the tile's place.
fn multiply(t: u32, weights: u32, k: u32, n: u32, bias: u32, points: u32) {
    let ty = ${PLACE[0]};
    let tx = ${PLACE[1]};
    let turn = ty & 7u;
    let wide = (n + 3u) / 4u;
    let deep = (k + 3u) / 4u;
    //$ for i, j in PRODUCTS:
    var c${i}_$j = NO;
    //$ end
    //$ for i in range(THIN):
    var h$i = NO;
    //$ end
    //$ if SLICED:
    for (var k0 = 0u; k0 < deep; k0 += ${SLICE // 4}u) {
    let depth = min(${SLICE // 4}u, deep - k0);
    if (k0 > 0u) {
        workgroupBarrier();
        fetch(t, weights + k0 * ${4 * FOURS}u, false);
        workgroupBarrier();
    }
    //$ else:
    const k0 = 0u;
    let depth = deep;
    //$ end
    if (wide > 1u) {
        for (var q = 0u; q < depth; q++) {
            let at = ty * ${FOURS}u + ((k0 + q) ^ turn);
            //$ for i in range(MR):
            let a$i = tile[at + ${i * DOWN * FOURS}u];
            //$ end
            let from_ = q * ${4 * FOURS}u + tx;
            //$ for d in range(4):
            {
                //$ for j in range(RUNS):
                let b$j = ${MATRIX}[from_ + ${d * FOURS + j * ACROSS}u];
                //$ end
                //$ for i, j in PRODUCTS:
                c${i}_$j = fma(vec4<f32>(a$i[$d]), b$j, c${i}_$j);
                //$ end
            }
            //$ end
        }
    } else {
        // Of a few columns an invocation has whole rows.
        for (var q = 0u; q < depth; q++) {
            //$ for d in range(4):
            let b$d = ${MATRIX}[q * ${4 * FOURS}u + ${d * FOURS}u];
            //$ end
            //$ for i in range(THIN):
            $IF_ROW
            let a$i = tile[place(t + ${i * INVOCATIONS}u, k0 + q)];
            //$ for d in range(4):
            h$i = fma(vec4<f32>(a$i[$d]), b$d, h$i);
            //$ end
            $END_ROW
            //$ end
        }
    }
    //$ if SLICED:
    }
    //$ end
    // No invocation reads the tile any more.
    workgroupBarrier();
    if (wide > 1u) {
        //$ for j in range(RUNS):
        {
            let four = ${j * ACROSS}u + tx;
            let there = inside(four, n);
            var more = NO;
            if (bias != NONE) {
                more = packed[bias + four];
            }
            let at = ty * ${FOURS}u + (four ^ turn);
            //$ for i in range(MR):
            {
                let row = ${i * DOWN}u + ty;
                let total = c${i}_$j + select(NO, more, row < points);
                tile[at + ${i * DOWN * FOURS}u] = select(NO, total, there & vec4<bool>(exists(row, points)));
            }
            //$ end
        }
        //$ end
    } else {
        let there = inside(0u, n);
        var more = NO;
        if (bias != NONE) {
            more = packed[bias];
        }
        //$ for i in range(THIN):
        {
            let row = t + ${i * INVOCATIONS}u;
            $IF_ROW
            let total = h$i + select(NO, more, row < points);
            tile[place(row, 0u)] = select(NO, total, there & vec4<bool>(exists(row, points)));
            $END_ROW
        }
        //$ end
    }
}

$GRADIENTS
@compute @workgroup_size($INVOCATIONS)
fn main(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
) {
    let number = group.x + group.y * grid.x;
    //$ if BACKWARD:
    let kept = p.kept + number * p.keeps;
    let plane = p.planes + number * p.plane;
    //$ end
    let first_tile = number * p.chunk;
    let last_tile = min(first_tile + p.chunk, p.tiles);
    for (var number_of_tile = first_tile; number_of_tile < last_tile; number_of_tile++) {
        let first = number_of_tile * ${POINTS}u;
        let points = min(${POINTS}u, p.count - first);
        workgroupBarrier();
        for (var four = 0u; four < (table[0].x + 3u) / 4u; four++) {
            for (var row = t; row < ${ROWS}u; row += ${INVOCATIONS}u) {
                tile[place(row, four)] = input(row, four, table[0].x, first, points);
            }
        }
        if (p.made > 0u) {
            fetch(t, table[0].w, table[0].x <= 4u);
        }
        workgroupBarrier();
        for (var layer = 0u; layer < p.made; layer++) {
            let words = table[layer * ${LAYER}u];
            let n = words.y;
            multiply(t, words.w, words.x, n, table[layer * ${LAYER}u + 1u].y, points);
            workgroupBarrier();
            if (layer + 1u < p.made) {
                fetch(t, table[(layer + 1u) * ${LAYER}u].w, n <= 4u);
            }
            //$ if BACKWARD:
            let sums = kept + layer * ${2 * AREA}u;
            //$ end
            switch (words.z) {
                //$ for i in ACTIVATIONS:
                case ${i}u: { forward_$i(t, points, n, layer > 0u$SUMS); }
                //$ end
                //$ if BACKWARD:
                default: { keep(t, points, n, sums + ${AREA}u); }
                //$ else:
                default: {}
                //$ end
            }
            workgroupBarrier();
        }
        //$ if BACKWARD:
        // What the forward kept is read by other invocations than wrote it.
        storageBarrier();
        for (var four = 0u; four < (p.outputs + 3u) / 4u; four++) {
            for (var row = t; row < ${ROWS}u; row += ${INVOCATIONS}u) {
                let point = row % ${POINTS}u;
                var found = NO;
                if (point < points) {
                    switch (row / ${POINTS}u) {
                        //$ for m, a, member in ENDS:
                        case ${m}u: {
                            if ((p.given & ${a.bit}u) != 0u) {
                                found = load_${a.name}(p.${a.name} + ${member}u * p.${a.name}_member + (first + point) * p.${a.name}_row, four, p.outputs);
                            }
                        }
                        //$ end
                        default: {}
                    }
                }
                tile[place(row, four)] = found;
            }
        }
        workgroupBarrier();
        for (var down = 0u; down < p.layers; down++) {
            let layer = p.layers - 1u - down;
            let words = table[layer * ${LAYER}u];
            let more = table[layer * ${LAYER}u + 1u];
            let k = words.x;
            let n = words.y;
            let sums = kept + layer * ${2 * AREA}u;
            let inputs = sums - ${AREA}u;
            switch (words.z) {
                //$ for i in ACTIVATIONS:
                case ${i}u: { backward_$i(t, points, n, layer > 0u, sums); }
                //$ end
                default: {}
            }
            //$ if APART:
            fetch(t, more.x, n <= 4u);
            //$ end
            if (p.by_weights != 0u) {
                bring(t, layer, k, inputs, 0u, first, points);
                workgroupBarrier();
                add_gradients(
                    t, layer, k, n, inputs, plane + more.z, plane + more.w, number_of_tile == first_tile, first, points,
                );
            }
            //$ if APART:
            else {
                workgroupBarrier();
            }
            if (layer == 0u && p.by_x == 0u) {
                break;
            }
            //$ else:
            workgroupBarrier();
            if (layer == 0u && p.by_x == 0u) {
                break;
            }
            fetch(t, more.x, n <= 4u);
            workgroupBarrier();
            //$ end
            multiply(t, more.x, n, k, NONE, points);
            workgroupBarrier();
        }
        if (p.by_x != 0u) {
            let n = table[0].x;
            for (var four = 0u; four < (n + 3u) / 4u; four++) {
                for (var point = t; point < points; point += ${INVOCATIONS}u) {
                    let found = tile[place(point, four)];
                    let at = p.d_x + (first + point) * p.d_x_row + four * 4u * p.d_x_column;
                    //$ for l in range(4):
                    if (four * 4u + ${l}u < n) {
                        d_x[at + ${l}u * p.d_x_column] = ${GIVE}(found[$l]);
                    }
                    //$ end
                }
            }
        }
        //$ else:
        for (var four = 0u; four < (p.outputs + 3u) / 4u; four++) {
            for (var point = t; point < points; point += ${INVOCATIONS}u) {
                //$ for m, a, member in ENDS:
                {
                    let found = tile[place(${m * POINTS}u + point, four)];
                    let at = p.${a.name} + ${member}u * p.${a.name}_member + (first + point) * p.${a.name}_row + four * 4u * p.${a.name}_column;
                    //$ for l in range(4):
                    if (four * 4u + ${l}u < p.outputs) {
                        ${a.name}[at + ${l}u * p.${a.name}_column] = ${GIVE}(found[$l]);
                    }
                    //$ end
                }
                //$ end
            }
        }
        //$ end
    }
}
