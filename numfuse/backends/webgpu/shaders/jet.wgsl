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
        $POINT
        //$ if BACKWARD:
        sum += d_z;
        //$ end
    }
    //$ if SUMS:
    column_sums[p.column_sums + number * p.n + column] = sum;
    //$ for i in APART:
    column_sums[p.column_sums + ${i + 1} * p.plane + number * p.n + column] = sum_$i;
    //$ end
    //$ end
}
