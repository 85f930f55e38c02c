
// Gates: an invocation for each element. The pair of each activation is written by the template.

struct GateParams { numel: u32 }

@group(0) @binding(0) var<storage, read> gate: array<f32>;
@group(0) @binding(1) var<storage, read> value: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> gate_params: GateParams;

@group(0) @binding(0) var<storage, read> d_out: array<f32>;
@group(0) @binding(1) var<storage, read> gate_saved: array<f32>;
@group(0) @binding(2) var<storage, read> value_saved: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_gate: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_value: array<f32>;
@group(0) @binding(5) var<uniform> gate_grad_params: GateParams;
//$ for name in GATES:

@compute @workgroup_size(256)
fn ${name}_mul_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < gate_params.numel) {
        out[id.x] = act_${name}(gate[id.x]) * value[id.x];
    }
}

@compute @workgroup_size(256)
fn ${name}_mul_bwd_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < gate_grad_params.numel) {
        let x = gate_saved[id.x];
        d_gate[id.x] = d_out[id.x] * value_saved[id.x] * slope_${name}(x);
        d_value[id.x] = d_out[id.x] * act_${name}(x);
    }
}
//$ end
