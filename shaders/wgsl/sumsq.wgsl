// partials[i] = sum of the squares of elements 1024 i to 1024 i + 1023: the first half of a global norm, `clip_scale` the other.
//
// Blocks are counted from the array's first element and reduced by 256 partials and a tree, however the dispatch is cut.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 1024)
    n: u32, // elements
    x_off: u32, // first element of x
    out_off: u32, // index of the first partial
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [n]
@group(0) @binding(2) var<storage, read_write> partials: array<f32>; // partials [ceil(n / 1024)] at out_off

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
    for (var i = 0u; i < 4u; i++) {
        let at = group * 1024u + i * 256u + lane;
        if (at < p.n) {
            sum = fma(x[p.x_off + at], x[p.x_off + at], sum);
        }
    }
    sum = tree_sum(lane, sum);
    if (lane == 0u) {
        partials[p.out_off + group] = sum;
    }
}
