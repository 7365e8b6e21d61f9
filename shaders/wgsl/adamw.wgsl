// One AdamW step with decoupled decay over a state array, in place; nothing at all when control word 0 is set.
//
// Rate, decay and bias corrections change from step to step: an input, computed by the host in f64. In place: no group may run
// twice.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 1024)
    n: u32, // elements
    off: u32, // first element, the same in all four arrays
    use_clip: u32, // 1: gradients are multiplied by control word 1; 0: taken as they are
    beta1: f32, // decay of the first moment
    rest1: f32, // 1 - beta1
    beta2: f32, // decay of the second moment
    rest2: f32, // 1 - beta2
    eps: f32, // added to the root of the second moment
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> grads: array<f32>; // grads [n]
@group(0) @binding(2) var<storage, read> control: array<u32>; // control [3] of clip_scale: non-finite, factor, norm
@group(0) @binding(3) var<storage, read> hyper: array<f32>; // hyper [8]: rate, 1 - rate * weight decay, 1 / (1 - beta1 ^ step), 1 / (1 - beta2 ^ step)
@group(0) @binding(4) var<storage, read_write> values: array<f32>; // values [n]
@group(0) @binding(5) var<storage, read_write> m: array<f32>; // first moment [n]
@group(0) @binding(6) var<storage, read_write> v: array<f32>; // second moment [n]

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = wid.x + wid.y * nwg.x + p.first_group;
    if (group >= p.groups) {
        return;
    }
    if (control[0] != 0u) {
        return;
    }
    let clip = select(1.0, bitcast<f32>(control[1]), p.use_clip == 1u);
    for (var i = 0u; i < 4u; i++) {
        let index = group * 1024u + i * 256u + lane;
        if (index >= p.n) {
            return;
        }
        let at = p.off + index;
        let g = grads[at] * clip;
        let first = fma(p.rest1, g, p.beta1 * m[at]);
        let second = fma(p.rest2 * g, g, p.beta2 * v[at]);
        let step = first * hyper[2] / (sqrt(second * hyper[3]) + p.eps);
        m[at] = first;
        v[at] = second;
        values[at] = fma(-hyper[0], step, values[at] * hyper[1]);
    }
}
