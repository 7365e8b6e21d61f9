// Sets bits of a word where any element is infinite or NaN, and changes nothing otherwise.
//
// Tested on the integer bits, since WGSL compilers may assume finite floats. An integer `or` gives the same word in any order.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 1024)
    n: u32, // elements
    x_off: u32, // first element of x
    word: u32, // index of the word to set
    bits: u32, // bits to set in it
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>; // x [n], f32 bits
@group(0) @binding(2) var<storage, read_write> control: array<atomic<u32>>; // words, of which one is set

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
        if (at < p.n && (x[p.x_off + at] & 0x7f800000u) == 0x7f800000u) {
            atomicOr(&control[p.word], p.bits);
        }
    }
}
