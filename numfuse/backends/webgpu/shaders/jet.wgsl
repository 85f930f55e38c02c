// A jet's pass: an invocation has a column of some points, and all members of each point. The loops
// over directions and second derivatives are of run-time lengths.

$HEADER

$FORMULAS

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = id.x + id.y * grid.x * 256u;
    if (i >= p.total) {
        return;
    }
    let number = i / p.n;
    let column = i % p.n;
    let place = number / p.chunks;
    let first = (number % p.chunks) * p.points;
    let last = min(first + p.points, p.m);
    var sum = $ACC(0);
    //$ for i in APART:
    var sum_$i = $ACC(0);
    //$ end
    for (var row = first; row < last; row++) {
        //$ for a in ARRAYS:
        let at_${a.name} = p.${a.name} + place * p.${a.name}_place + row * p.${a.name}_row + column * p.${a.name}_column;
        //$ end
        //$ for name in READ["value"]:
        let in_$name = ${LOAD[name]};
        //$ end
        //$ if CALL["value"]:
        let made = ${CALL["value"]};
        //$ end
        //$ if BACKWARD:
        //$ for x in TOTALS:
        var $x = ${MADE["value"].get(x, ZERO)};
        //$ end
        //$ if DIRECTIONS:
        //$ for i in APART or [""]:
        //$ if APART:
        {
            let d = ${i}u;
        //$ else:
        for (var d = 0u; d < p.directions; d++) {
        //$ end
            //$ if "grad_bent" in READ["direction"]:
            //$ if WEIGHTED:
            var in_grad_bent = $ZERO;
            for (var s = 0u; s < p.seconds; s++) {
                let weight = weights[s * p.directions + d];
                if (weight != 0) {
                    in_grad_bent += weight * ${LOAD["grad_ddot"]};
                }
            }
            //$ else:
            let s = d;
            let in_grad_bent = ${LOAD["grad_ddot"]};
            //$ end
            //$ end
            //$ for name in READ["direction"]:
            //$ if name != "grad_bent":
            let in_$name = ${LOAD[name]};
            //$ end
            //$ end
            //$ if CALL["direction"]:
            let moved = ${CALL["direction"]};
            //$ end
            //$ for x in TOTALS:
            $x += ${MADE["direction"].get(x, ZERO)};
            //$ end
            //$ if "d_z_dot" in STORE:
            ${STORE["d_z_dot"]}(${MADE["direction"].get("d_z_dot", ZERO)});
            //$ end
            //$ if APART:
            sum_$i += ${MADE["direction"].get("d_z_dot", ZERO)};
            //$ end
        }
        //$ end
        //$ end
        //$ if SECONDS:
        for (var s = 0u; s < p.seconds; s++) {
            //$ for name in READ["second"]:
            let in_$name = ${LOAD[name]};
            //$ end
            //$ if CALL["second"]:
            let moved = ${CALL["second"]};
            //$ end
            //$ for x in TOTALS:
            $x += ${MADE["second"].get(x, ZERO)};
            //$ end
            //$ if "d_z_ddot" in STORE:
            ${STORE["d_z_ddot"]}(${MADE["second"].get("d_z_ddot", ZERO)});
            //$ end
        }
        //$ end
        //$ for x in TOTALS:
        //$ if x in STORE:
        ${STORE[x]}($x);
        //$ end
        //$ end
        sum += d_z;
        //$ else:
        ${STORE["out"]}(${MADE["value"].get("out", ZERO)});
        //$ if "pre" in STORE:
        ${STORE["pre"]}(${MADE["value"].get("pre", ZERO)});
        //$ end
        //$ if DIRECTIONS:
        for (var d = 0u; d < p.directions; d++) {
            //$ for name in READ["direction"]:
            let in_$name = ${LOAD[name]};
            //$ end
            //$ if CALL["direction"]:
            let moved = ${CALL["direction"]};
            //$ end
            ${STORE["out_dot"]}(${MADE["direction"].get("out_dot", ZERO)});
        }
        //$ end
        //$ if SECONDS:
        for (var s = 0u; s < p.seconds; s++) {
            var total = $ZERO;
            //$ if CALL["bend"]:
            //$ if WEIGHTED:
            for (var d = 0u; d < p.directions; d++) {
                let weight = weights[s * p.directions + d];
                if (weight != 0) {
                    //$ for name in READ["bend"]:
                    let in_$name = ${LOAD[name]};
                    //$ end
                    total += weight * ${CALL["bend"]}.bent;
                }
            }
            //$ else:
            let d = s;
            //$ for name in READ["bend"]:
            let in_$name = ${LOAD[name]};
            //$ end
            total = ${CALL["bend"]}.bent;
            //$ end
            //$ end
            //$ for name in READ["second"]:
            let in_$name = ${LOAD[name]};
            //$ end
            //$ if CALL["second"]:
            total += ${CALL["second"]}.straight;
            //$ end
            ${STORE["out_ddot"]}(total);
        }
        //$ end
        //$ end
    }
    //$ if SUMS:
    column_sums[p.column_sums + number * p.n + column] = sum;
    //$ for i in APART:
    column_sums[p.column_sums + ${i + 1} * p.plane + number * p.n + column] = sum_$i;
    //$ end
    //$ end
}
