// From the partial sums of squares of all gradients: the factor of clipping, min(1, max_norm / norm), and the norm itself.
//
// The control words are what the update kernels read, so that a step needs no readback: word 0 is not 0 after anything
// non-finite, word 1 holds factor * scale, word 2 the norm (f32 bits). The host clears them at the start of a step.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: 1
    count: u32, // partials
    max_norm: f32, // largest norm let through; 0: no clipping, the factor is 1
    scale: f32, // factor of the gradients that the sums do not hold yet, applied to the norm
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> partials: array<f32>; // partials [count] of sumsq
@group(0) @binding(2) var<storage, read_write> control: array<u32>; // control [3]: non-finite, factor, norm

var<workgroup> lanes: array<f32, 256>;

// Sum of all lanes by a fixed binary tree; every lane gets it.
fn tree_sum(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    lanes[lane] = x;
    for (var step = 128u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if (lane < step) {
            lanes[lane] = lanes[lane] + lanes[lane + step];
        }
    }
    workgroupBarrier();
    return lanes[0];
}

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
    var sum = 0.0;
    for (var i = lane; i < p.count; i += 256u) {
        sum += partials[i];
    }
    sum = tree_sum(lane, sum);
    if (lane == 0u) {
        let norm = sqrt(sum) * p.scale;
        var factor = 1.0;
        if (p.max_norm > 0.0 && norm > p.max_norm) {
            factor = p.max_norm / norm;
        }
        let bits = bitcast<u32>(norm);
        // On the bits: a compiler may assume that a float is finite.
        if ((bits & 0x7f800000u) == 0x7f800000u) {
            control[0] = control[0] | 1u;
        }
        control[1] = bitcast<u32>(factor * p.scale);
        control[2] = bits;
    }
}
