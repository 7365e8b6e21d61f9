// out[t, :] = table[ids[t] - first_row, :], rows of a table in its own dtype, as f32.
//
// An id outside the rows at hand gives zeros, or with `keep` leaves the output alone, so that a table cut into pieces is
// gathered piece by piece.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(t * d / 1024)
    t: u32, // number of ids
    d: u32, // length of a row
    rows: u32, // rows of the table at hand
    first_row: u32, // id of the table's first row at hand
    ids_off: u32, // first id
    table_off: u32, // first element of the table
    keep: u32, // 1: ids outside leave the output as it is; 0: they give zeros
}

// 0 f32, 1 f16, 2 bf16.
override TABLE_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // ids [t]
@group(0) @binding(2) var<storage, read> table: array<u32>; // table [rows, d], TABLE_DTYPE
@group(0) @binding(3) var<storage, read_write> out: array<f32>; // out [t, d]

fn load_table(i: u32) -> f32 {
    if (TABLE_DTYPE == 0u) {
        return bitcast<f32>(table[i]);
    }
    let word = table[i >> 1u];
    if (TABLE_DTYPE == 1u) {
        return unpack2x16float(word)[i & 1u];
    }
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (i & 1u) == 1u));
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
    for (var i = 0u; i < 4u; i++) {
        let at = group * 1024u + i * 256u + lane;
        if (at >= p.t * p.d) {
            return;
        }
        // An id below first_row wraps to a large number and is outside as well.
        let row = u32(ids[p.ids_off + at / p.d]) - p.first_row;
        if (row < p.rows) {
            out[at] = load_table(p.table_off + row * p.d + at % p.d);
        } else if (p.keep == 0u) {
            out[at] = 0.0;
        }
    }
}
