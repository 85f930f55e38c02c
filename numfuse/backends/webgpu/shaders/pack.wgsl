// Weights and biases of a network, one behind another in rows padded with zeros; where it is asked
// for, transposed too. A row of workgroups has an array.

$HEADER

fn number(slot: u32, at: u32) -> f32 {
    switch (slot) {
        //$ for i in range(1, SLOTS):
        case ${i}u: { return f32(from_$i[at]); }
        //$ end
        default: { return f32(from_0[at]); }
    }
}

// An element of a matrix of these lengths and strides; 0 outside.
fn element(slot: u32, lengths: vec2<u32>, strides: vec2<u32>, at: vec2<u32>) -> f32 {
    if (at.x < lengths.x && at.y < lengths.y) {
        return number(slot, arrays[slot].first + at.x * strides.x + at.y * strides.y);
    }
    return 0.0;
}

fn four(slot: u32, lengths: vec2<u32>, strides: vec2<u32>, at: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(
        element(slot, lengths, strides, at),
        element(slot, lengths, strides, at + vec2<u32>(0u, 1u)),
        element(slot, lengths, strides, at + vec2<u32>(0u, 2u)),
        element(slot, lengths, strides, at + vec2<u32>(0u, 3u)),
    );
}

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.y >= p.count) {
        return;
    }
    let slot = arrays[id.y];
    let at = vec2<u32>(id.x / ${WIDTH // 4}u, id.x % ${WIDTH // 4}u * 4u);
    let lengths = vec2<u32>(slot.rows, slot.columns);
    let strides = vec2<u32>(slot.row, slot.column);
    if (at.x < slot.height) {
        packed[slot.to + id.x] = four(id.y, lengths, strides, at);
    }
    if (at.x < slot.turned_height) {
        packed[slot.turned + id.x] = four(id.y, lengths.yx, strides.yx, at);
    }
}
