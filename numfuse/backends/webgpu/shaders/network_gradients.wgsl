// --- gradients of weights --------------------------------------------------------------------------
// A layer's inputs to workgroup memory, rows from `row0` on.
fn bring(t: u32, layer: u32, k: u32, from_: u32, row0: u32, first: u32, points: u32) {
    if (layer == 0u) {
        for (var four = 0u; four < (k + 3u) / 4u; four++) {
            for (var row = t; row < ${BROUGHT}u; row += ${INVOCATIONS}u) {
                other[row * ${FOURS}u + four] = input(row0 + row, four, k, first, points);
            }
        }
        return;
    }
    let at = from_ + row0 * ${FOURS}u;
    //$ for i in range(BRINGS):
    let x$i = work[at + t + ${i * INVOCATIONS}u];
    //$ end
    //$ for i in range(BRINGS):
    other[t + ${i * INVOCATIONS}u] = x$i;
    //$ end
}

// Add the gradients of a layer's weights and bias to the workgroup's plane, or begin it.
fn add_gradients(
    t: u32, layer: u32, k: u32, n: u32, from_: u32, d_w: u32, d_bias: u32, fresh: bool, first: u32, points: u32,
) {
    let high = (k + 3u) / 4u;
    let wide = (n + 3u) / 4u;
    let rows = select(${MEMBERS * POINTS}u, ${(1 + D) * POINTS}u, layer == 0u);
    if (high > 1u && wide > 1u) {
        let team = t / ${TEAM}u;
        let dy = ${PLACE[0]};
        let dx = ${PLACE[1]};
        //$ for i, j in D_SUMS:
        var d${i}_$j = NO;
        //$ end
        //$ for j in range(D_WIDE):
        var s$j = NO;
        //$ end
        //$ if PARTS > 1:
        for (var row0 = 0u; row0 < rows; row0 += ${OTHER_ROWS}u) {
        if (row0 > 0u) {
            workgroupBarrier();
            bring(t, layer, k, from_, row0, first, points);
            workgroupBarrier();
        }
        let end = min(rows, row0 + ${OTHER_ROWS}u);
        //$ else:
        const row0 = 0u;
        let end = rows;
        //$ end
        let values = clamp(${POINTS}u, row0, end);
        //$ for biased, begin, to in LOOPS:
        for (var row = $begin + team; row < $to; row += ${UNROLLED * TEAMS}u) {
            //$ for v in range(UNROLLED):
            {
                let x_at = (row - row0 + ${v * TEAMS}u) * ${FOURS}u + dy;
                let y_at = (row + ${v * TEAMS}u) * ${FOURS}u;
                let turn = (row + ${v * TEAMS}u) & 7u;
                //$ for i in range(D_HIGH):
                let a$i = other[x_at + ${i * D_DOWN}u];
                //$ end
                //$ for j in range(D_WIDE):
                let b$j = tile[y_at + ((${j * D_ACROSS}u + dx) ^ turn)];
                //$ end
                //$ for i, j in D_SUMS:
                d${i}_$j = fma(vec4<f32>(a${i // 4}[${i % 4}]), b$j, d${i}_$j);
                //$ end
                //$ if biased:
                //$ for j in range(D_WIDE):
                s$j += b$j;
                //$ end
                //$ end
            }
            //$ end
        }
        //$ end
        //$ if PARTS > 1:
        }
        //$ end
        //$ if TEAMS > 1:
        // The second team's sums go through workgroup memory to the first.
        workgroupBarrier();
        if (team == 1u) {
            //$ for i, j in D_SUMS:
            other[((${i // 4 * D_DOWN}u + dy) * 4u + ${i % 4}u) * ${FOURS}u + ${j * D_ACROSS}u + dx] = d${i}_$j;
            //$ end
        }
        workgroupBarrier();
        if (team == 0u) {
            //$ for i, j in D_SUMS:
            d${i}_$j += other[((${i // 4 * D_DOWN}u + dy) * 4u + ${i % 4}u) * ${FOURS}u + ${j * D_ACROSS}u + dx];
            //$ end
        }
        workgroupBarrier();
        if (team == 1u && dy == 0u) {
            //$ for j in range(D_WIDE):
            other[${j * D_ACROSS}u + dx] = s$j;
            //$ end
        }
        workgroupBarrier();
        if (team == 0u && dy == 0u) {
            //$ for j in range(D_WIDE):
            s$j += other[${j * D_ACROSS}u + dx];
            //$ end
        }
        if (team == 0u) {
        //$ end
        if (!fresh) {
            // All are read before one is written; what is outside is not.
            //$ for i, j in D_SUMS:
            let o${i}_$j = work[d_w + min((${i // 4 * D_DOWN}u + dy) * 4u + ${i % 4}u, k - 1u) * wide + min(${j * D_ACROSS}u + dx, wide - 1u)];
            //$ end
            //$ for i, j in D_SUMS:
            d${i}_$j += o${i}_$j;
            //$ end
        }
        //$ for i, j in D_SUMS:
        if ((${i // 4 * D_DOWN}u + dy) * 4u + ${i % 4}u < k && ${j * D_ACROSS}u + dx < wide) {
            work[d_w + ((${i // 4 * D_DOWN}u + dy) * 4u + ${i % 4}u) * wide + ${j * D_ACROSS}u + dx] = d${i}_$j;
        }
        //$ end
        //$ for j in range(D_WIDE):
        if (dy == 0u && ${j * D_ACROSS}u + dx < wide) {
            let at = d_bias + ${j * D_ACROSS}u + dx;
            if (!fresh) {
                s$j += work[at];
            }
            work[at] = s$j;
        }
        //$ end
        //$ if TEAMS > 1:
        }
        //$ end
        return;
    }
    // Few columns on a side: blocks of 4 x 4 along the other one, of which each part of the workgroup
    // adds up some rows.
    let four = t % ${FOURS}u;
    let part = t / ${FOURS}u;
    let works = part < ${THIN_PARTS}u;
    let a_at = select(four, 0u, high == 1u);
    let b_at = select(four, 0u, wide == 1u);
    //$ for i in range(4):
    var d$i = NO;
    //$ end
    var sum = NO;
    //$ if PARTS > 1:
    for (var row0 = 0u; row0 < rows; row0 += ${OTHER_ROWS}u) {
    if (row0 > 0u) {
        workgroupBarrier();
        bring(t, layer, k, from_, row0, first, points);
        workgroupBarrier();
    }
    let end = min(rows, row0 + ${OTHER_ROWS}u);
    //$ else:
    const row0 = 0u;
    let end = rows;
    //$ end
    for (var row = row0 + select(end, part, works); row < end; row += ${THIN_PARTS}u) {
        let x = other[(row - row0) * ${FOURS}u + a_at];
        let y = tile[place(row, b_at)];
        //$ for i in range(4):
        d$i = fma(vec4<f32>(x[$i]), y, d$i);
        //$ end
        if (row < ${POINTS}u) {
            sum += y;
        }
    }
    //$ if PARTS > 1:
    }
    //$ end
    workgroupBarrier();
    if (works) {
        //$ for i in range(4):
        other[part * ${5 * FOURS}u + ${i * FOURS}u + four] = d$i;
        //$ end
        other[part * ${5 * FOURS}u + ${4 * FOURS}u + four] = sum;
    }
    workgroupBarrier();
    for (var e = t; e < ${5 * FOURS}u; e += ${INVOCATIONS}u) {
        let i = e / ${FOURS}u;
        let column = e % ${FOURS}u;
        var total = other[e];
        for (var next = 1u; next < ${THIN_PARTS}u; next++) {
            total += other[next * ${5 * FOURS}u + e];
        }
        let row = select(column, 0u, high == 1u) * 4u + i;
        let at = select(d_w + row * wide + select(column, 0u, wide == 1u), d_bias + column, i == 4u);
        if (select(row < k && column < high * wide, column < wide, i == 4u)) {
            if (!fresh) {
                total += work[at];
            }
            work[at] = total;
        }
    }
}
