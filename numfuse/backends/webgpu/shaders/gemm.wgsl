// An epilogue of C = X Y, or of operands alone, for X (M, K) and Y (K, N) in any strides: a workgroup
// makes one BLOCK_M x BLOCK_N block of C, an invocation MR x NR values of it in registers, K in slices
// of BLOCK_K through workgroup memory.  The next slice is on its way to registers while this one is
// multiplied.
//$ if RIGHT[1:]:
// A group of products over one X: for each Y a tile, and sums of its own.
//$ end
//
//$ if SLICES:
// A chain of sums over K ends after so many SLICES, and is added to those before: the errors of a
// chain grow with the root of its length.
//
//$ end
// Trusted: every index below fits 32 bits; strides may be negative (they wrap); where an array is
// WIDE, its offset, strides and lengths are multiples of 4.
//
// A workgroup array has two axes, the first with indices that are bound: only the second, the same
// for all, is then checked against its length.

$HEADER

$EPILOGUE
//$ for b in INPUTS:
// Four neighbours of a row; what lies past the last column is 0.
fn load_${b.name}(at: u32, column: u32) -> vec4<$ACC> {
    //$ if b.access.wide:
    return vec4<$ACC>(${b.buffer}[at / 4u]);
    //$ else:
    var value = vec4<$ACC>();
    //$ for d in range(4):
    if (column + ${d}u < p.n) {
        value[$d] = $ACC(${b.buffer}[at + ${d}u * p.${b.array}_column]);
    }
    //$ end
    return value;
    //$ end
}
//$ end

//$ for b in OUTPUTS:
fn store_${b.name}(at: u32, column: u32, value: vec4<$ACC>) {
    //$ if b.access.wide:
    ${b.buffer}[at / 4u] = vec4<${b.access.scalar}>(value);
    //$ else:
    //$ for d in range(4):
    if (column + ${d}u < p.n) {
        ${b.buffer}[at + ${d}u * p.${b.array}_column] = ${b.access.scalar}(value[$d]);
    }
    //$ end
    //$ end
}
//$ end

//$ if PRODUCT:
//$ for o in FACTORS:
var<workgroup> ${o.NAME}_tile: array<array<vec4<$ACC>, ${o.PITCH}>, $BLOCK_K>;
//$ end
//$ end
//$ if COLUMN_SUMS or ROW_SUMS:
var<workgroup> sums: array<array<vec4<$ACC>, ${BLOCK_N // NR}>, ${BLOCK_M // MR}>;
//$ end

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(local_invocation_index) t: u32, @builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) grid: vec3<u32>) {
    // Blocks in columns of GROUP rows of blocks: neighbours in time share operands in the cache.
    let block_rows = (p.m + ${BLOCK_M - 1}u) / ${BLOCK_M}u;
    let block_columns = (p.n + ${BLOCK_N - 1}u) / ${BLOCK_N}u;
    let block = workgroup.x + workgroup.y * grid.x;
    if (block >= block_rows * block_columns) {
        return;
    }
    let group = block / (${GROUP}u * block_columns);
    let group_rows = min(block_rows - group * ${GROUP}u, ${GROUP}u);
    let within = block - group * ${GROUP}u * block_columns;
    let row_block = group * ${GROUP}u + within % group_rows;
    let row0 = row_block * ${BLOCK_M}u;
    let column0 = within / group_rows * ${BLOCK_N}u;
    let plane = p.first_plane + workgroup.z;

    // An invocation's rows and columns: MR / 4 and NR / 4 runs of four.
    let tx = $TX;
    let ty = $TY;

    //$ if PLACES:
    let place_number = plane / (p.parts * p.groups) * p.summed;
    //$ if SEGMENTS:
    let first_segment = plane / p.parts % p.groups * p.segments;
    var segment = place_number + first_segment;
    let last_segment = place_number + min(first_segment + p.segments, p.summed);
    let place = places[segment];
    //$ else:
    let place = places[place_number];
    //$ end
    //$ else:
    let place = Place($PLACE);
    //$ end

    //$ if PRODUCT:
    //$ for s, i, j in SUMS:
    var ${s.C}${i}_$j = vec4<$ACC>();
    //$ end
    //$ if SLICES:
    // The sums of chains that have ended.
    //$ for s, i, j in SUMS:
    var ${s.KEPT}${i}_$j = vec4<$ACC>();
    //$ end
    var chains = 0u;
    //$ end
    let k_first = plane % p.parts * p.part;
    let k_end = min(k_first + p.part, p.k);
    var k0 = k_first;
    //$ for o in FACTORS:
    var ${o.NAME}_at = place.${o.NAME};
    //$ end
    //$ for o, i in LOADS:
    // a run of four outputs, or, where K is contiguous, a square of four runs along k
    //$ if o.TURNED and K_FIRST:
    let ${o.NAME}_o$i = (t + ${i * INVOCATIONS}u) / ${BLOCK_K // 4}u;
    let ${o.NAME}_k$i = (t + ${i * INVOCATIONS}u) % ${BLOCK_K // 4}u * ${o.LINES}u;
    //$ else:
    let ${o.NAME}_o$i = (t + ${i * INVOCATIONS}u) % ${o.BLOCK // 4}u;
    let ${o.NAME}_k$i = (t + ${i * INVOCATIONS}u) / ${o.BLOCK // 4}u * ${o.LINES}u;
    //$ end
    //$ for c in range(o.LINES):
    var ${o.NAME}_v${i}_$c = vec4<$ACC>();
    //$ end
    //$ end

    var running = k0 < k_end;
    //$ if SEGMENTS:
    running = running && segment < last_segment;
    //$ end
    var ahead = false;
    //$ if SLICES:
    loop { // a chain
    var slices = 0u;
    //$ end
    loop {
        // What was fetched in the last turn goes to workgroup memory; the first turn only fetches.
        if (ahead) {
            workgroupBarrier();
            //$ for o, i in LOADS:
            ${o.IF_IN_TILE[i]}
            //$ if o.TURNED:
            //$ for c in range(4):
            ${o.NAME}_tile[${o.NAME}_k$i + ${c}u][${o.NAME}_o$i] = vec4<$ACC>(${o.NAME}_v${i}_0[$c], ${o.NAME}_v${i}_1[$c], ${o.NAME}_v${i}_2[$c], ${o.NAME}_v${i}_3[$c]);
            //$ end
            //$ else:
            ${o.NAME}_tile[${o.NAME}_k$i][${o.NAME}_o$i] = ${o.NAME}_v${i}_0;
            //$ end
            ${o.END_IN_TILE[i]}
            //$ end
            workgroupBarrier();
        }
        let multiply = ahead;
        ahead = running;
        if (running) {
            //$ for o, i in LOADS:
            ${o.IF_IN_TILE[i]}
            {
                let at = ${o.NAME}_at + (${o.ORIGIN} + ${o.NAME}_o$i * 4u) * p.${o.STRIDE_O} + (k0 + ${o.NAME}_k$i) * p.${o.STRIDE_K};
                let o = ${o.ORIGIN} + ${o.NAME}_o$i * 4u;
                let k = k0 + ${o.NAME}_k$i;
                //$ for c in range(o.LINES):
                ${o.NAME}_v${i}_$c = vec4<$ACC>();
                //$ if o.WIDE:
                if (${o.LINE} + ${c}u < ${o.LINE_END} && ${o.ALONG} < ${o.ALONG_END}) {
                    ${o.NAME}_v${i}_$c = vec4<$ACC>(${o.NAME}[(at + ${c}u * p.${o.LINE_STRIDE}) / 4u]);
                }
                //$ else:
                if (${o.LINE} + ${c}u < ${o.LINE_END}) {
                    //$ for d in range(4):
                    if (${o.ALONG} + ${d}u < ${o.ALONG_END}) {
                        ${o.NAME}_v${i}_$c[$d] = $ACC(${o.NAME}[at + ${c}u * p.${o.LINE_STRIDE} + ${d}u * p.${o.ALONG_STRIDE}]);
                    }
                    //$ end
                }
                //$ end
                //$ end
            }
            ${o.END_IN_TILE[i]}
            //$ end
            k0 += ${BLOCK_K}u;
            running = k0 < k_end;
            //$ if SEGMENTS:
            if (!running) {
                segment += 1u;
                running = segment < last_segment;
                k0 = k_first;
                if (running) {
                    //$ for o in FACTORS:
                    ${o.NAME}_at = places[segment].${o.NAME};
                    //$ end
                }
            }
            //$ end
        }
        if (multiply) {
            //$ for k in range(BLOCK_K):
            {
                //$ for i in range(MR // 4):
                let x$i = x_tile[$k][ty + ${i * (BLOCK_M // MR)}u];
                //$ end
                //$ for s in RIGHT:
                //$ for j in range(NR // 4):
                let ${s.Y}$j = ${s.Y}_tile[$k][tx + ${j * (BLOCK_N // NR)}u];
                //$ end
                //$ end
                //$ for s, i, j in SUMS:
                ${s.C}${i}_$j = fma(vec4<$ACC>(x${i // 4}[${i % 4}]), ${s.Y}$j, ${s.C}${i}_$j);
                //$ end
            }
            //$ end
            //$ if SLICES:
            slices += 1u;
            //$ end
        }
        if (!ahead) {
            break;
        }
        //$ if SLICES:
        if (slices >= ${SLICES}u) {
            break;
        }
        //$ end
    }
    //$ if SLICES:
    if (!ahead) {
        break;
    }
    chains += 1u;
    //$ for s, i, j in SUMS:
    ${s.KEPT}${i}_$j += ${s.C}${i}_$j;
    ${s.C}${i}_$j = vec4<$ACC>();
    //$ end
    }
    if (chains != 0u) {
        //$ for s, i, j in SUMS:
        ${s.C}${i}_$j += ${s.KEPT}${i}_$j;
        //$ end
    }
    //$ end
    //$ end

    //$ for n, value in ROW_SUMS:
    //$ for i in range(MR // 4):
    var ${value}_of_$i = vec4<$ACC>();
    //$ end
    //$ end
    // One copy of the epilogue for all MR x NR / 4 runs: unrolled, it would be most of the code.
    for (var j = 0u; j < ${NR // 4}u; j++) {
        let column = column0 + j * ${BLOCK_N // (NR // 4)}u + tx * 4u;
        //$ for n, sum in COLUMN_SUMS:
        var $sum = vec4<$ACC>();
        //$ end
        if (column < p.n) {
            //$ for r in [r for r in INPUTS if r.by_column]:
            let ${r.name}_here = load_${r.name}(place.${r.array} + column * p.${r.array}_column, column);
            //$ end
            for (var i = 0u; i < ${MR}u; i++) {
                let row = row0 + i / 4u * ${BLOCK_M // (MR // 4)}u + ty * 4u + i % 4u;
                if (row < p.m) {
                    //$ if PRODUCT:
                    //$ for s in RIGHT:
                    var ${s.Z}_here = vec4<$ACC>();
                    //$ end
                    switch (j * ${MR}u + i) {
                        //$ for e in range(MR * NR // 4 - 1):
                        case ${e}u: { ${TAKEN[e]} }
                        //$ end
                        default: { ${TAKEN[-1]} }
                    }
                    //$ end
                    //$ for r in [r for r in INPUTS if not r.by_column]:
                    let ${r.name}_here = load_${r.name}(place.${r.array} + row * p.${r.array}_row + column * p.${r.array}_column, column);
                    //$ end
                    //$ for a in ARGUMENTS:
                    let made_${a[0]} = epilogue(${a[1]});
                    //$ end
                    //$ for n, sum in COLUMN_SUMS:
                    $sum = vec4<$ACC>(made_0.$sum, made_1.$sum, made_2.$sum, made_3.$sum);
                    //$ end
                    //$ for n, value in ROW_SUMS:
                    {
                        var four = vec4<$ACC>(made_0.$value, made_1.$value, made_2.$value, made_3.$value);
                        four = select(vec4<$ACC>(), four, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.n - column));
                        let added = (four[0] + four[1]) + (four[2] + four[3]);
                        switch (i) {
                            //$ for i in range(MR - 1):
                            case ${i}u: { ${value}_of_${i // 4}[${i % 4}] += added; }
                            //$ end
                            default: { ${value}_of_${(MR - 1) // 4}[3] += added; }
                        }
                    }
                    //$ end
                    //$ for w in OUTPUTS:
                    store_${w.name}(place.${w.array} + $ROW * p.${w.array}_row + column * p.${w.array}_column, column, ${MADE[w.name]});
                    //$ end
                }
            }
        }
        //$ for n, sum in COLUMN_SUMS:
        // Down the rows of the block in a fixed order: in registers, then over the invocations.
        workgroupBarrier();
        sums[ty][tx] = $sum;
        workgroupBarrier();
        if (ty == 0u) {
            for (var i = 1u; i < ${BLOCK_M // MR}u; i++) {
                $sum += sums[i][tx];
            }
            //$ if n:
            let at = ((p.planes * ${n}u + p.first_plane + workgroup.z) * block_rows + row_block) * p.n + column;
            //$ else:
            let at = ((p.first_plane + workgroup.z) * block_rows + row_block) * p.n + column;
            //$ end
            //$ for d in range(4):
            if (column + ${d}u < p.n) {
                column_sums[at + ${d}u] = $sum[$d];
            }
            //$ end
        }
        //$ end
    }
    //$ for n, value in ROW_SUMS:
    //$ for i in range(MR // 4):
    // Along the columns of the block: in registers, then over the invocations.
    workgroupBarrier();
    sums[ty][tx] = ${value}_of_$i;
    workgroupBarrier();
    if (tx == 0u) {
        var total = sums[ty][0];
        for (var q = 1u; q < ${BLOCK_N // NR}u; q++) {
            total += sums[ty][q];
        }
        let row = row0 + ${i * (BLOCK_M // (MR // 4))}u + ty * 4u;
        //$ if n:
        let plane_of_sums = p.planes * ${n}u + p.first_plane + workgroup.z;
        //$ else:
        let plane_of_sums = p.first_plane + workgroup.z;
        //$ end
        let at = (plane_of_sums * block_columns + within / group_rows) * p.m + row;
        //$ for d in range(4):
        if (row + ${d}u < p.m) {
            row_sums[at + ${d}u] = total[$d];
        }
        //$ end
    }
    //$ end
    //$ end
}
