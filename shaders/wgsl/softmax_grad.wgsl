// dx = y * (dy - sum(dy * y)) over the last axis, the backward of softmax from its output; geometry as in softmax.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows
    rows: u32, // rows of y
    n: u32, // length of a row
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> y: array<f32>; // y [rows, n], the softmax
@group(0) @binding(2) var<storage, read> dy: array<f32>; // dy [rows, n]
@group(0) @binding(3) var<storage, read_write> dx: array<f32>; // dx [rows, n]

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
    let at = group * p.n;
    var sum = 0.0;
    for (var i = lane; i < p.n; i += 256u) {
        sum = fma(dy[at + i], y[at + i], sum);
    }
    sum = tree_sum(lane, sum);
    for (var i = lane; i < p.n; i += 256u) {
        dx[at + i] = y[at + i] * (dy[at + i] - sum);
    }
}
