// Strided reduce, one workgroup an output: thread t folds elements t, t + 256, ... in order, then a fixed binary tree.
//
// The geometry belongs to the op and depends on nothing but the shape. Counts up to 32 are `reduce_small`, another geometry:
// the choice is made from the shape, once, by the graph.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: outputs
    outputs: u32, // product of the kept dimensions
    count: u32, // product of the reduced dimensions
    kept_rank: u32, // number of kept dimensions, 0 to 6
    red_rank: u32, // number of reduced dimensions, 0 to 6
    a_off: u32, // first element of a
    scale: f32, // factor of a mean: 1 / count
    kept_shape: array<vec4<u32>, 2>, // kept dimensions, outermost first, dimension d at [d / 4][d % 4]
    kept_stride: array<vec4<u32>, 2>, // their strides in a
    red_shape: array<vec4<u32>, 2>, // reduced dimensions, outermost first
    red_stride: array<vec4<u32>, 2>, // their strides in a
}

const OP_SUM: u32 = 0u; // sum
const OP_MEAN: u32 = 1u; // sum times `scale`
const OP_MAX: u32 = 2u; // largest
const OP_ARGMAX: u32 = 3u; // index of the largest as i32, the lowest index winning a tie
override OP: u32 = 0u;
// 0 f32, 1 f16, 2 bf16.
override A_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<u32>; // a [kept.., reduced..], strided, A_DTYPE
@group(0) @binding(2) var<storage, read_write> out: array<u32>; // out [outputs], f32 bits (argmax: i32)

var<workgroup> value: array<f32, 256>;
var<workgroup> index: array<u32, 256>;

fn load(i: u32) -> f32 {
    if (A_DTYPE == 0u) {
        return bitcast<f32>(a[i]);
    }
    let word = a[i >> 1u];
    if (A_DTYPE == 1u) {
        return unpack2x16float(word)[i & 1u];
    }
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (i & 1u) == 1u));
}

fn kept_at(output: u32) -> u32 {
    var rest = output;
    var at = p.a_off;
    for (var d = p.kept_rank; d > 0u; d--) {
        let size = p.kept_shape[(d - 1u) / 4u][(d - 1u) % 4u];
        at += rest % size * p.kept_stride[(d - 1u) / 4u][(d - 1u) % 4u];
        rest /= size;
    }
    return at;
}

fn reduced_at(i: u32) -> u32 {
    if (p.red_rank == 1u) {
        return i * p.red_stride[0].x;
    }
    var rest = i;
    var at = 0u;
    for (var d = p.red_rank; d > 0u; d--) {
        let size = p.red_shape[(d - 1u) / 4u][(d - 1u) % 4u];
        at += rest % size * p.red_stride[(d - 1u) / 4u][(d - 1u) % 4u];
        rest /= size;
    }
    return at;
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
    let base = kept_at(group);

    if (OP == OP_SUM || OP == OP_MEAN) {
        // Four elements a turn, in the same order: lavapipe silently ends all loops of an invocation after 65,535 turns.
        var sum = 0.0;
        for (var i = lane; i < p.count; i += 1024u) {
            sum += load(base + reduced_at(i));
            if (i + 256u < p.count) {
                sum += load(base + reduced_at(i + 256u));
            }
            if (i + 512u < p.count) {
                sum += load(base + reduced_at(i + 512u));
            }
            if (i + 768u < p.count) {
                sum += load(base + reduced_at(i + 768u));
            }
        }
        value[lane] = sum;
    } else {
        // A thread without elements repeats the last one, which changes no maximum: no infinity is needed to start from.
        let start = min(lane, p.count - 1u);
        var best = load(base + reduced_at(start));
        var best_at = start;
        for (var i = lane + 256u; i < p.count; i += 256u) {
            let x = load(base + reduced_at(i));
            if (x > best) {
                best = x;
                best_at = i;
            }
        }
        value[lane] = best;
        index[lane] = best_at;
    }

    for (var step = 128u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if (lane < step) {
            let x = value[lane];
            let y = value[lane + step];
            if (OP == OP_SUM || OP == OP_MEAN) {
                value[lane] = x + y;
            } else if (y > x || (y == x && index[lane + step] < index[lane])) {
                value[lane] = y;
                index[lane] = index[lane + step];
            }
        }
    }
    if (lane == 0u) {
        var bits = bitcast<u32>(value[0]);
        if (OP == OP_MEAN) {
            bits = bitcast<u32>(p.scale * value[0]);
        } else if (OP == OP_ARGMAX) {
            bits = index[0];
        }
        out[group] = bits;
    }
}
