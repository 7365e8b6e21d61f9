// y = softmax(x) over the last axis, one workgroup a row: 256 partials, thread t over elements t, t + 256, ..., then a tree.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows
    rows: u32, // rows of x
    n: u32, // length of a row
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [rows, n]
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // y [rows, n]

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

fn tree_max(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    lanes[lane] = x;
    for (var step = 128u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if (lane < step) {
            lanes[lane] = max(lanes[lane], lanes[lane + step]);
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
    // A lane without elements repeats the last one, which changes no maximum.
    var largest = x[at + min(lane, p.n - 1u)];
    for (var i = lane + 256u; i < p.n; i += 256u) {
        largest = max(largest, x[at + i]);
    }
    largest = tree_max(lane, largest);
    var sum = 0.0;
    for (var i = lane; i < p.n; i += 256u) {
        sum += exp(x[at + i] - largest);
    }
    sum = tree_sum(lane, sum);
    for (var i = lane; i < p.n; i += 256u) {
        y[at + i] = exp(x[at + i] - largest) / sum;
    }
}
