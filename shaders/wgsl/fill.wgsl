// Writes one 32-bit pattern to every word: a constant of any dtype, packed by the host, so that its bits are exact.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(words / 1024)
    words: u32, // 32-bit words to write
    value: u32, // the pattern: f32 bits, i32 bits, or two packed f16 / bf16
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<u32>; // out [words]

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
        if (at < p.words) {
            out[at] = p.value;
        }
    }
}
