// dlogits = (softmax - onehot) * scale * dloss[token] for a block of the vocabulary; 0 where the label is negative (masked).

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows * ceil(width / 1024)
    rows: u32, // tokens
    width: u32, // logits of this block
    first: u32, // vocabulary index of the block's first logit
    stride: u32, // distance of two rows of the block, in logits and in dlogits
    first_row: u32, // token of the block's first row: rows of stats, labels and dloss count from token 0
    scale: f32, // factor of all: 1 / unmasked tokens where the loss is their mean
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>; // logits [rows, width], rows stride apart
@group(0) @binding(2) var<storage, read> stats: array<f32>; // stats [tokens, 3] of ce_lse, finished
@group(0) @binding(3) var<storage, read> labels: array<i32>; // labels [tokens]; negative: masked
@group(0) @binding(4) var<storage, read> dloss: array<f32>; // dloss [tokens], gradient of each token's loss
@group(0) @binding(5) var<storage, read_write> dlogits: array<f32>; // dlogits [rows, width], rows stride apart

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
    let chunks = (p.width + 1023u) / 1024u;
    let row = group / chunks;
    let token = row + p.first_row;
    let largest = stats[token * 3u];
    let sum = stats[token * 3u + 1u];
    let label = u32(labels[token]) - p.first;
    let masked = labels[token] < 0;
    let factor = p.scale * dloss[token];
    for (var i = 0u; i < 4u; i++) {
        let col = group % chunks * 1024u + i * 256u + lane;
        if (col >= p.width) {
            return;
        }
        let at = row * p.stride + col;
        let share = exp(logits[at] - largest) / sum;
        let grad = (share - select(0.0, 1.0, col == label)) * factor;
        dlogits[at] = select(grad, 0.0, masked);
    }
}
