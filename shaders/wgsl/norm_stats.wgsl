// (mean, r) of every row, r = 1 / sqrt(mean square around the mean + eps): what the weight gradient of a norm needs.
//
// For an rms norm the mean is taken as 0. Geometry and bits of r as in rms_norm and layer_norm.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows
    rows: u32, // rows of x
    n: u32, // length of a row
    inv_n: f32, // 1 / n
    eps: f32, // added to the mean square
}

const OP_RMS: u32 = 0u; // mean = 0
const OP_LAYER: u32 = 1u; // the row's mean
override OP: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [rows, n]
@group(0) @binding(2) var<storage, read_write> stats: array<f32>; // stats [rows, 2]: mean, r

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
    var mean = 0.0;
    if (OP == OP_LAYER) {
        var sum = 0.0;
        for (var i = lane; i < p.n; i += 256u) {
            sum += x[at + i];
        }
        mean = tree_sum(lane, sum) * p.inv_n;
    }
    var squares = 0.0;
    for (var i = lane; i < p.n; i += 256u) {
        let d = x[at + i] - mean;
        squares = fma(d, d, squares);
    }
    let total = tree_sum(lane, squares);
    if (lane == 0u) {
        stats[group * 2u] = mean;
        stats[group * 2u + 1u] = inverseSqrt(fma(total, p.inv_n, p.eps));
    }
}
