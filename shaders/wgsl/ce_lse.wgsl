// Running (maximum, sum of exponentials, label's logit) of each row, over a block of the vocabulary.
//
// The vocabulary is merged in chunks of exactly 1,024 in ascending order, each chunk reduced by 256 partials and a tree: blocks
// that begin at multiples of 1,024 give the bits of the whole, so the logits of a large vocabulary never exist at once.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows
    rows: u32, // tokens
    width: u32, // logits of this block; a multiple of 1,024 unless the block is the last
    first: u32, // vocabulary index of the block's first logit, a multiple of 1,024
    stride: u32, // distance of two rows of the block
    first_row: u32, // token of the block's first row: rows of labels and stats count from token 0
    start: u32, // 1: the block is the first, nothing is read from stats; 0: it goes on
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>; // logits [rows, width], rows stride apart
@group(0) @binding(2) var<storage, read> labels: array<i32>; // labels [tokens]; negative: masked
@group(0) @binding(3) var<storage, read_write> stats: array<f32>; // stats [tokens, 3]: maximum, sum, label's logit

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
    let at = group * p.stride;
    let row = group + p.first_row;
    var largest = -1e30;
    var sum = 0.0;
    if (p.start == 0u) {
        largest = stats[row * 3u];
        sum = stats[row * 3u + 1u];
    }
    for (var chunk = 0u; chunk < p.width; chunk += 1024u) {
        let end = min(chunk + 1024u, p.width);
        // A lane without elements repeats the last one, which changes no maximum.
        var here = logits[at + min(chunk + lane, end - 1u)];
        for (var i = chunk + lane + 256u; i < end; i += 256u) {
            here = max(here, logits[at + i]);
        }
        here = tree_max(lane, here);
        var part = 0.0;
        for (var i = chunk + lane; i < end; i += 256u) {
            part += exp(logits[at + i] - here);
        }
        part = tree_sum(lane, part);
        let raised = max(largest, here);
        sum = fma(sum, exp(largest - raised), part * exp(here - raised));
        largest = raised;
    }
    workgroupBarrier();
    if (lane == 0u) {
        stats[row * 3u] = largest;
        stats[row * 3u + 1u] = sum;
        let label = u32(labels[row]) - p.first;
        if (labels[row] >= 0 && label < p.width) {
            stats[row * 3u + 2u] = logits[at + label];
        } else if (p.start == 1u) {
            stats[row * 3u + 2u] = 0.0;
        }
    }
}
