// cache[b, start + i, h, :] = x[b, i, h, :]: new keys or values go behind what a cache holds, at a position that is an input.
//
// Rows of a batch stand at positions of their own. What a row does not count among its keys, and what has no room, is not written.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(b * t * h * d / 1024)
    b: u32, // batch rows
    t: u32, // new positions
    h: u32, // heads
    d: u32, // features of a head
    s: u32, // positions that the cache has room for
    x_off: u32, // first element of x
    x_b: u32, // stride of x over the batch
    x_t: u32, // stride of x over positions
    x_h: u32, // stride of x over heads
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [b, t, h, d], strided, features adjacent
@group(0) @binding(2) var<storage, read> rows: array<u32>; // rows [b, 2]: position of the first new entry, entries after the last
@group(0) @binding(3) var<storage, read_write> cache: array<f32>; // cache [b, s, h, d]

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
    for (var step = 0u; step < 4u; step++) {
        let index = group * 1024u + step * 256u + lane;
        if (index >= p.b * p.t * p.h * p.d) {
            return;
        }
        let i = index % p.d;
        let head = index / p.d % p.h;
        let entry = index / (p.d * p.h) % p.t;
        let row = index / (p.d * p.h * p.t);
        let position = rows[row * 2u] + entry;
        if (position < min(rows[row * 2u + 1u], p.s)) {
            cache[((row * p.s + position) * p.h + head) * p.d + i] = x[p.x_off + row * p.x_b + entry * p.x_t + head * p.x_h + i];
        }
    }
}
