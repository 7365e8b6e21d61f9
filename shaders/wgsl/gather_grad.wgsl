// dtable[row, :] = sum of dy[t, :] over the t with ids[t] = row, in order: the backward of gather.
//
// A workgroup owns part of one table row and looks at every id, so no two threads add to one element and no float atomics
// are needed. It may start from the stored gradient: micro-batches carry.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows * ceil(d / 256)
    t: u32, // number of ids
    d: u32, // length of a row
    rows: u32, // rows of the table at hand
    first_row: u32, // id of the table's first row at hand
    ids_off: u32, // first id
    out_off: u32, // first element of the gradient
    carry: u32, // 1: sums start from the stored gradient; 0: from zero
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // ids [t]
@group(0) @binding(2) var<storage, read> dy: array<f32>; // dy [t, d]
@group(0) @binding(3) var<storage, read_write> dtable: array<f32>; // dtable [rows, d]

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
    let blocks = (p.d + 255u) / 256u;
    let row = group / blocks;
    let col = group % blocks * 256u + lane;
    if (col >= p.d) {
        return;
    }
    let at = p.out_off + row * p.d + col;
    var acc = 0.0;
    if (p.carry == 1u) {
        acc = dtable[at];
    }
    for (var i = 0u; i < p.t; i++) {
        if (u32(ids[p.ids_off + i]) == row + p.first_row) {
            acc += dy[i * p.d + col];
        }
    }
    dtable[at] = acc;
}
