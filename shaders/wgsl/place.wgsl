// out[view] = a, or out[view] += a: writes a dense f32 tensor into a strided part of a larger one.
//
// A KV cache takes new keys this way, and a state array a gradient: elementwise writes dense outputs only.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 1024)
    n: u32, // elements of a
    rank: u32, // dimensions of a, 0 to 6
    a_off: u32, // first element of a
    out_off: u32, // first element of the view
    add: u32, // 1: add to what is there; 0: replace it
    shape: array<vec4<u32>, 2>, // dimensions of a, outermost first, dimension d at [d / 4][d % 4]
    out_stride: array<vec4<u32>, 2>, // strides of the view; no two elements may meet
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>; // a [shape], dense
@group(0) @binding(2) var<storage, read_write> out: array<f32>; // the larger tensor, strided over shape

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
    for (var i = 0u; i < 4u; i++) {
        let index = group * 1024u + i * 256u + lane;
        if (index >= p.n) {
            return;
        }
        var rest = index;
        var at = p.out_off;
        for (var left = p.rank; left > 0u; left--) {
            let d = left - 1u;
            let size = p.shape[d / 4u][d % 4u];
            at += rest % size * p.out_stride[d / 4u][d % 4u];
            rest /= size;
        }
        if (p.add == 1u) {
            out[at] = out[at] + a[p.a_off + index];
        } else {
            out[at] = a[p.a_off + index];
        }
    }
}
