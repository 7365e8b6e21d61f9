//! Runs one kernel on a device and compares it with its twin, with nothing of the engine between.
//!
//! A kernel that writes past its output, reads what was never written, or depends on how its groups are dispatched, fails here:
//! every output is followed by guard words inside its binding, a fresh output is poisoned with NaN, and one call runs the same
//! work whole, cut into ranges of groups, and folded to two dimensions. Async throughout and never blocking, so one test body
//! serves natively and in a browser.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use ebbtide_shaders::{Access, BF16, F16, F32, I32, I64, Shader, U8};

/// Words behind an output, inside its binding: a kernel that writes past its end lands here.
const GUARD_WORDS: usize = 64;
const GUARD: u32 = 0xdead_beef;
/// A quiet NaN that no kernel makes: an output word left at this was not written.
pub const POISON: u32 = 0x7fc0_dead;

/// One storage buffer of a run, in the order of the shader's bindings.
#[derive(Clone, Copy, Debug)]
pub enum Buf<'a> {
    /// Read-only input.
    In(&'a [u32]),
    /// Read-write, starts from these words.
    InOut(&'a [u32]),
    /// Read-write, this many words, poisoned.
    Fresh(usize),
    /// The buffer of an earlier entry again; both read-only.
    Same(usize),
}

/// How the groups of an op are dispatched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Launch {
    /// One dimension, one dispatch.
    Whole,
    /// Ranges of this many groups, one dispatch each.
    Cuts(u32),
    /// Two dimensions, this many workgroups wide; the last row may hang over.
    Folded(u32),
}

/// A device at WebGPU's default limits, whatever the adapter allows, with the pipelines made so far.
pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    pipelines: RefCell<HashMap<String, wgpu::ComputePipeline>>,
    /// Name of the adapter.
    pub adapter: String,
}

impl Gpu {
    /// Opens the first adapter that `WGPU_BACKEND` and `WGPU_ADAPTER_NAME` (part of its name) allow; panics when there is none.
    pub async fn open() -> Self {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let wanted = std::env::var("WGPU_ADAPTER_NAME").unwrap_or_default().to_lowercase();
        let adapter = if cfg!(target_arch = "wasm32") || wanted.is_empty() {
            instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await.expect("an adapter")
        } else {
            let found = instance.enumerate_adapters(wgpu::Backends::all()).await;
            found
                .into_iter()
                .find(|a| a.get_info().name.to_lowercase().contains(&wanted))
                .unwrap_or_else(|| panic!("no adapter named like `{wanted}`"))
        };
        let request = wgpu::DeviceDescriptor { required_limits: wgpu::Limits::default(), ..Default::default() };
        let (device, queue) = adapter.request_device(&request).await.expect("a device at WebGPU's default limits");
        Self { device, queue, pipelines: RefCell::default(), adapter: adapter.get_info().name }
    }

    /// Runs `shader` once and gives the words of every read-write buffer, in binding order.
    ///
    /// The groups are counted by `groups` in `params`; panics on a validation error, a broken guard word, or a binding list
    /// that does not fit the shader.
    pub async fn run(
        &self,
        shader: &Shader,
        overrides: &[(&str, u32)],
        params: &impl bytemuck::Pod,
        bufs: &[Buf<'_>],
        launch: Launch,
    ) -> Vec<Vec<u32>> {
        let params: &[u8] = bytemuck::bytes_of(params);
        assert_eq!(params.len(), shader.params_size as usize, "{}: size of Params", shader.name);
        assert_eq!(bufs.len(), shader.bindings.len(), "{}: number of bindings", shader.name);
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let pipeline = self.pipeline(shader, overrides);

        let buffers: Vec<Option<wgpu::Buffer>> = bufs.iter().map(|buf| self.buffer(buf)).collect();
        let resolve = |i: usize| match bufs[i] {
            Buf::Same(j) => buffers[j].as_ref(),
            _ => buffers[i].as_ref(),
        };
        let layout = pipeline.get_bind_group_layout(0);
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut uniforms = Vec::new();
        for (first, [x, y]) in dispatches(u32_at(params, 4), launch) {
            let mut bytes = params.to_vec();
            bytes[..4].copy_from_slice(&first.to_le_bytes());
            let uniform = self.upload(&bytes, wgpu::BufferUsages::UNIFORM);
            let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: uniform.as_entire_binding() }];
            for (i, binding) in shader.bindings.iter().enumerate() {
                let buffer = resolve(i).unwrap_or_else(|| panic!("{}: Same of a Same", shader.name));
                let writes = matches!(bufs[i], Buf::InOut(_) | Buf::Fresh(_));
                assert_eq!(
                    writes,
                    binding.access == Access::ReadWrite,
                    "{}: access of `{}`",
                    shader.name,
                    binding.name
                );
                entries.push(wgpu::BindGroupEntry { binding: binding.binding, resource: buffer.as_entire_binding() });
            }
            let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(shader.name),
                layout: &layout,
                entries: &entries,
            });
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(x, y, 1);
            drop(pass);
            uniforms.push(uniform);
        }
        let mut readbacks = Vec::new();
        for (buf, buffer) in bufs.iter().zip(&buffers) {
            if let (Buf::InOut(_) | Buf::Fresh(_), Some(buffer)) = (buf, buffer) {
                let readback = self.device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("readback"),
                    size: buffer.size(),
                    usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                });
                encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, buffer.size());
                readbacks.push(readback);
            }
        }
        self.queue.submit([encoder.finish()]);
        if let Some(error) = scope.pop().await {
            panic!("{} {overrides:?}: {error}", shader.name);
        }
        let mut out = Vec::new();
        for readback in &readbacks {
            let mut words = self.read(readback).await;
            let guard = words.split_off(words.len() - GUARD_WORDS);
            let broken = guard.iter().position(|&g| g != GUARD);
            assert_eq!(broken, None, "{} {overrides:?}: wrote past the end of an output", shader.name);
            out.push(words);
        }
        for buffer in buffers.iter().flatten().chain(&readbacks).chain(&uniforms) {
            buffer.destroy();
        }
        out
    }

    /// Runs whole, cut and folded; panics unless all give the same bits, and gives them.
    pub async fn run_every_way(
        &self,
        shader: &Shader,
        overrides: &[(&str, u32)],
        params: &impl bytemuck::Pod,
        bufs: &[Buf<'_>],
    ) -> Vec<Vec<u32>> {
        let whole = self.run(shader, overrides, params, bufs, Launch::Whole).await;
        let groups = u32_at(bytemuck::bytes_of(params), 4);
        // A fold may hang over the end, where ids from `groups` up must do nothing.
        for launch in [Launch::Cuts(groups.div_ceil(3).max(1)), Launch::Folded(groups.div_ceil(2).max(2))] {
            let other = self.run(shader, overrides, params, bufs, launch).await;
            for (a, b) in whole.iter().zip(&other) {
                same_words(&format!("{} {launch:?}", shader.name), b, a);
            }
        }
        whole
    }

    fn pipeline(&self, shader: &Shader, overrides: &[(&str, u32)]) -> wgpu::ComputePipeline {
        let key = format!("{} {overrides:?}", shader.name);
        let make = || {
            for (name, _) in overrides {
                let known = shader.overrides.iter().any(|o| o.name == *name);
                assert!(known, "{}: no override `{name}`", shader.name);
            }
            let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(shader.name),
                source: wgpu::ShaderSource::Wgsl(shader.source.into()),
            });
            let constants: Vec<(&str, f64)> = overrides.iter().map(|(n, v)| (*n, f64::from(*v))).collect();
            self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(shader.name),
                layout: None,
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &constants,
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            })
        };
        self.pipelines.borrow_mut().entry(key).or_insert_with(make).clone()
    }

    fn buffer(&self, buf: &Buf<'_>) -> Option<wgpu::Buffer> {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let guarded = |mut words: Vec<u32>| {
            words.extend([GUARD; GUARD_WORDS]);
            Some(self.upload(bytemuck::cast_slice(&words), usage))
        };
        match buf {
            Buf::In(words) => Some(self.upload(bytemuck::cast_slice(words), usage)),
            Buf::InOut(words) => guarded(words.to_vec()),
            Buf::Fresh(words) => guarded(vec![POISON; *words]),
            Buf::Same(_) => None,
        }
    }

    fn upload(&self, bytes: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes.len().max(4) as u64,
            usage: usage | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        self.queue.write_buffer(&buffer, 0, bytes);
        buffer
    }

    async fn read(&self, buffer: &wgpu::Buffer) -> Vec<u32> {
        type Shared = Arc<Mutex<(Option<Result<(), wgpu::BufferAsyncError>>, Option<Waker>)>>;
        let shared: Shared = Arc::default();
        let told = Arc::clone(&shared);
        buffer.map_async(wgpu::MapMode::Read, .., move |result| {
            let mut state = told.lock().expect("not poisoned");
            state.0 = Some(result);
            if let Some(waker) = state.1.take() {
                waker.wake();
            }
        });
        std::future::poll_fn(|cx| {
            self.device.poll(wgpu::PollType::Poll).expect("the device is alive");
            let mut state = shared.lock().expect("not poisoned");
            if let Some(result) = state.0.take() {
                return Poll::Ready(result);
            }
            state.1 = Some(cx.waker().clone());
            if !cfg!(target_arch = "wasm32") {
                // Natively nobody calls back unless the device is polled, so ask to be polled again.
                std::thread::yield_now();
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await
        .expect("a readable buffer");
        let words = bytemuck::cast_slice(&buffer.get_mapped_range(..).expect("mapped")).to_vec();
        buffer.unmap();
        words
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn dispatches(groups: u32, launch: Launch) -> Vec<(u32, [u32; 2])> {
    match launch {
        Launch::Whole => vec![(0, [groups, 1])],
        Launch::Cuts(size) => {
            (0..groups).step_by(size as usize).map(|first| (first, [size.min(groups - first), 1])).collect()
        }
        Launch::Folded(width) => vec![(0, [width, groups.div_ceil(width)])],
    }
}

/// How far a result may lie from its oracle: `|got - want| <= abs + rel * max(|want|, scale)`, `scale` the largest |want|
/// of the tensor times `of_largest`.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Part of the value itself.
    pub rel: f64,
    /// Part of the tensor's largest value: sums cancel, so a small output of large terms carries their rounding.
    pub of_largest: f64,
}

/// Moves of data, integers, comparisons: no difference at all.
pub const EXACT: Tolerance = Tolerance { rel: 0.0, of_largest: 0.0 };
/// f32 arithmetic with WGSL's built-in functions (exp: 3 + 2|x| units in the last place) over sums of some hundred terms.
pub const STRICT: Tolerance = Tolerance { rel: 4e-6, of_largest: 2e-6 };
/// Rounded to f16 at the end: half a unit of 11 bits, and STRICT before it.
pub const HALF: Tolerance = Tolerance { rel: 5e-4, of_largest: 3e-6 };
/// Rounded to bf16 at the end: half a unit of 8 bits, and STRICT before it.
pub const BRAIN: Tolerance = Tolerance { rel: 4e-3, of_largest: 3e-6 };
/// sin and cos: WGSL promises 2^-11 absolute on [-pi, pi] and no more.
pub const TRIGONOMETRIC: Tolerance = Tolerance { rel: 0.0, of_largest: 4.9e-4 };

/// Panics, naming the first five elements out of tolerance, unless `got` is near `want`. NaN matches only NaN.
pub fn near(what: &str, got: &[f32], want: &[f64], tolerance: Tolerance) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let largest = want.iter().filter(|w| w.is_finite()).fold(0.0f64, |m, w| m.max(w.abs()));
    let bad: Vec<String> = got
        .iter()
        .zip(want)
        .enumerate()
        .filter(|(_, (got, want))| {
            let got = f64::from(**got);
            let allowed = tolerance.rel * want.abs() + tolerance.of_largest * largest;
            let equal = got == **want || (got.is_nan() && want.is_nan());
            let within = (got - **want).abs() <= allowed;
            !equal && !within
        })
        .map(|(i, (got, want))| format!("[{i}] got {got:e} want {want:e}"))
        .collect();
    assert!(bad.is_empty(), "{what}: {} of {} off: {}", bad.len(), want.len(), bad[..bad.len().min(5)].join(", "));
}

/// Panics, naming the first five, unless all words are equal.
pub fn same_words(what: &str, got: &[u32], want: &[u32]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let bad: Vec<String> = (0..got.len())
        .filter(|&i| got[i] != want[i])
        .map(|i| format!("[{i}] got {:#010x} want {:#010x}", got[i], want[i]))
        .collect();
    assert!(
        bad.is_empty(),
        "{what}: {} of {} words differ: {}",
        bad.len(),
        want.len(),
        bad[..bad.len().min(5)].join(", ")
    );
}

/// Words as floats.
pub fn floats(words: &[u32]) -> Vec<f32> {
    words.iter().map(|w| f32::from_bits(*w)).collect()
}

/// Floats as words.
pub fn words(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Floats as f64.
pub fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Packs values into words of `dtype`; an odd last half-word is padded with garbage that a kernel must not let through.
pub fn encode(values: &[f32], dtype: u32) -> Vec<u32> {
    let pairs = |of: Vec<u16>| {
        of.chunks(2).map(|c| u32::from(c[0]) | u32::from(*c.get(1).unwrap_or(&0x7e01)) << 16).collect::<Vec<u32>>()
    };
    match dtype {
        F32 => words(values),
        F16 => pairs(values.iter().map(|v| half::f16::from_f32(*v).to_bits()).collect()),
        BF16 => pairs(values.iter().map(|v| half::bf16::from_f32(*v).to_bits()).collect()),
        I32 => values.iter().map(|v| (*v as i32) as u32).collect(),
        I64 => values.iter().flat_map(|v| [(*v as i64) as u32, ((*v as i64) >> 32) as u32]).collect(),
        U8 => values.chunks(4).map(|c| c.iter().rev().fold(0, |w, v| w << 8 | u32::from(*v as u8))).collect(),
        other => panic!("no dtype {other}"),
    }
}

/// The first `n` values of words of `dtype`.
pub fn decode(words: &[u32], n: usize, dtype: u32) -> Vec<f32> {
    let part = |i: usize, bits: u32| words[i * bits as usize / 32] >> (i as u32 * bits % 32);
    (0..n)
        .map(|i| match dtype {
            F32 => f32::from_bits(words[i]),
            F16 => half::f16::from_bits(part(i, 16) as u16).to_f32(),
            BF16 => f32::from_bits(part(i, 16) << 16),
            I32 => words[i] as i32 as f32,
            I64 => words[2 * i] as i32 as f32,
            U8 => f32::from(part(i, 8) as u8),
            other => panic!("no dtype {other}"),
        })
        .collect()
}

/// Values as they are after a trip through `dtype`: what a kernel sees of them.
pub fn through(values: &[f32], dtype: u32) -> Vec<f32> {
    decode(&encode(values, dtype), values.len(), dtype)
}

/// Repeatable numbers in [-1, 1), different for each seed.
pub struct Random(u64);

impl Random {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next 32 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    /// The next number in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / 8_388_608.0 - 1.0
    }

    /// The next number below `n`.
    pub fn below(&mut self, n: u32) -> u32 {
        self.bits() % n.max(1)
    }

    /// `n` numbers in [-1, 1).
    pub fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Makes tests of async functions that take an open [`Gpu`]: natively on the test's thread, in a browser awaited.
///
/// A function left out of the list is unused, and the compiler says so.
#[macro_export]
macro_rules! gpu_tests {
    ($($name:ident),* $(,)?) => {
        mod on_device {
            use $crate::kernel::Gpu;
            #[cfg(target_arch = "wasm32")]
            wasm_bindgen_test::wasm_bindgen_test_configure!(run_in_browser);
            $(
                #[cfg(not(target_arch = "wasm32"))]
                #[test]
                fn $name() {
                    pollster::block_on(async { super::$name(&Gpu::open().await).await });
                }
                #[cfg(target_arch = "wasm32")]
                #[wasm_bindgen_test::wasm_bindgen_test]
                async fn $name() {
                    super::$name(&Gpu::open().await).await;
                }
            )*
        }
    };
}
