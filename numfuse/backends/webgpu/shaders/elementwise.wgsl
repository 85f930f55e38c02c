// An epilogue, element by element of arrays that lie in one order in memory; an invocation takes one
// element, or four where all arrays begin at a multiple of four.

$HEADER

$EPILOGUE

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = p.first + id.x + id.y * grid.x * 256u;
    if (i >= p.last) {
        return;
    }
    //$ for r in INPUTS:
    let ${r.name}_here = $READ(${r.array}[p.${r.array} + i]);
    //$ end
    //$ for a in ARGUMENTS:
    let made_${a[0]} = epilogue(${a[1]});
    //$ end
    //$ for w in OUTPUTS:
    ${w.array}[p.${w.array} + i] = ${w.access.element}(${MADE[w.name]});
    //$ end
}
