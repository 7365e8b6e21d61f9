// out[i] = scale * s[0]: a device scalar spread over a tensor. The backward of mean and sum, without a readback.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 1024)
    n: u32, // elements to write
    s_off: u32, // index of the scalar
    scale: f32, // factor
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> s: array<f32>; // s [1] at s_off
@group(0) @binding(2) var<storage, read_write> out: array<f32>; // out [n]

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
    let value = p.scale * s[p.s_off];
    for (var i = 0u; i < 4u; i++) {
        let at = group * 1024u + i * 256u + lane;
        if (at < p.n) {
            out[at] = value;
        }
    }
}
