// An epilogue, element by element of arrays that lie in one order in memory; an invocation takes one
// element, or four where all arrays begin at a multiple of four.
//$ if STRIDED:
// Here each array has strides of its own, 0 where it is broadcast; the last axis is the fastest.
//$ end

$HEADER

$EPILOGUE

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = p.first + id.x + id.y * grid.x * 256u;
    if (i >= p.last) {
        return;
    }
    //$ if STRIDED:
    let jk = i / p.shape_3;
    let ij = jk / p.shape_2;
    let place = vec4<u32>(ij / p.shape_1, ij % p.shape_1, jk % p.shape_2, i % p.shape_3);
    //$ for r in [*INPUTS, *OUTPUTS]:
    let strides_${r.array} = vec4<u32>(p.${r.array}_0, p.${r.array}_1, p.${r.array}_2, p.${r.array}_3);
    let steps_${r.array} = place * strides_${r.array};
    let at_${r.array} = p.${r.array} + steps_${r.array}[0] + steps_${r.array}[1] + steps_${r.array}[2] + steps_${r.array}[3];
    //$ end
    //$ for r in INPUTS:
    let ${r.name}_here = $READ(${r.buffer}[at_${r.array}]);
    //$ end
    //$ else:
    //$ for r in INPUTS:
    //$ if r.by_column:
    let ${r.name}_here = $READ($ACC(${r.buffer}[p.${r.array}]));
    //$ else:
    let ${r.name}_here = $READ(${r.buffer}[p.${r.array} + i]);
    //$ end
    //$ end
    //$ end
    //$ for a in ARGUMENTS:
    let made_${a[0]} = epilogue(${a[1]});
    //$ end
    //$ for w in OUTPUTS:
    //$ if STRIDED:
    ${w.buffer}[at_${w.array}] = ${w.access.element}(${MADE[w.name]});
    //$ else:
    ${w.buffer}[p.${w.array} + i] = ${w.access.element}(${MADE[w.name]});
    //$ end
    //$ end
}
