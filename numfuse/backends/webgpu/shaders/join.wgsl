// out[o, g, i] = sum of planes[o, q, i] over the q of group g, one after another: the order that
// makes the sum the same every time.
//$ if not PLAIN:
// What the additions lose is summed beside it (Knuth's exact sum of two numbers), so that it is
// rounded once.
//$ end

$HEADER

//$ if not PLAIN:
// x as a number of its own.  A compiler may take (a + b) - a for b; it knows of no bits that are
// none (sizes are below 2^31).
fn rounded(x: $REAL) -> $REAL {
    return bitcast<$REAL>(bitcast<$WORD>(x) | $WORD(p.size >> 31u));
}

// What is lost beside an infinity is no number, and does not count.
$FINITE

//$ if WIDE:
fn each_rounded(x: $ACC) -> $ACC {
    return $ACC(rounded(x[0]), rounded(x[1]), rounded(x[2]), rounded(x[3]));
}

fn each_nf_finite(x: $ACC) -> $ACC {
    return $ACC(nf_finite(x[0]), nf_finite(x[1]), nf_finite(x[2]), nf_finite(x[3]));
}

//$ end
//$ end
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let number = id.x + id.y * grid.x * 256u;
    if (number >= p.total) {
        return;
    }
    let i = number % p.size;
    let o = number / p.size / p.groups;
    let g = number / p.size % p.groups;
    let first = g * p.width;
    let last = min(first + p.width, p.depth);
    var at = p.planes + (o * p.depth + first) * p.size + i;
    //$ if ADD:
    var sum = $ACC(out[p.out + number]);
    //$ else:
    var sum = $ACC();
    //$ end
    //$ if not PLAIN:
    var lost = $ACC();
    //$ end
    // Some planes are read before the first of them is added; the rest come one by one.
    var q = first;
    //$ for ahead in (AHEAD, 1):
    for (; q + ${ahead - 1}u < last; q += ${ahead}u) {
        //$ for i in range(ahead):
        let plane_$i = planes[at + ${i}u * p.size];
        //$ end
        //$ for i in range(ahead):
        {
            //$ if PLAIN:
            sum += plane_$i;
            //$ else:
            let total = ${EACH}rounded(sum + plane_$i);
            let added = ${EACH}rounded(total - sum);
            lost += (sum - (total - added)) + (plane_$i - added);
            sum = total;
            //$ end
        }
        //$ end
        at += ${ahead}u * p.size;
    }
    //$ end
    //$ if not PLAIN:
    sum += ${EACH}nf_finite(lost);
    //$ end
    out[p.out + number] = $OUT_TYPE(sum);
}
