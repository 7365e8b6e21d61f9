// loss[row] = maximum + log(sum) - label's logit from the finished stats of ce_lse; 0 where the label is negative (masked).

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(rows / 256)
    rows: u32, // tokens
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> stats: array<f32>; // stats [rows, 3] of ce_lse: maximum, sum, label's logit
@group(0) @binding(2) var<storage, read> labels: array<i32>; // labels [rows]; negative: masked
@group(0) @binding(3) var<storage, read_write> loss: array<f32>; // loss [rows]

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
    let row = group * 256u + lane;
    if (row >= p.rows) {
        return;
    }
    var value = 0.0;
    if (labels[row] >= 0) {
        value = (stats[row * 3u] - stats[row * 3u + 2u]) + log(stats[row * 3u + 1u]);
    }
    loss[row] = value;
}
