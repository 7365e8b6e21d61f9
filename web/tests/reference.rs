//! Whole models and trainings, with one body for the native engine and for the browser: what the reference library gives, and
//! what the two give one another.
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)] // a failing test may panic

use ebbtide::compile::{Options, compile_with};
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec, Targets};
use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, Inputs, inspect};
use ebbtide::llm::trainer::{Micro, RunPlan, RunSpec, Trainer};
use ebbtide::nn::AdamW;
use ebbtide::{Budget, Cancel, Catalog, Device, DeviceChoice, Session, Source};

/// One body, two places: natively a test of the thread, in the browser one of its event loop.
macro_rules! both {
    ($(#[$meta:meta])* async fn $name:ident() $body:block) => {
        $(#[$meta])*
        #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
        #[cfg(target_arch = "wasm32")]
        async fn $name() $body

        $(#[$meta])*
        #[cfg(not(target_arch = "wasm32"))]
        #[test]
        fn $name() {
            pollster::block_on(async $body)
        }
    };
}

#[cfg(target_arch = "wasm32")]
wasm_bindgen_test::wasm_bindgen_test_configure!(run_in_dedicated_worker);

macro_rules! reference {
    ($($path:literal),+) => {
        include_bytes!(concat!("../../tests/fixtures/refs/", $($path),+)).as_slice()
    };
}

macro_rules! family {
    ($name:literal) => {
        Family {
            name: $name,
            config: reference!($name, "/f32/config.json"),
            weights: reference!($name, "/f32/model.safetensors"),
            values: reference!($name, "/ref_f32.safetensors"),
        }
    };
}

/// Tolerances that the references support (their README).
const LOGITS: f32 = 2e-4;
const LOSS: f32 = 2e-5;
/// What native and browser may differ by.
const APART: f64 = 1e-4;

struct Family {
    name: &'static str,
    config: &'static [u8],
    weights: &'static [u8],
    values: &'static [u8],
}

const FAMILIES: [Family; 4] = [family!("llama_untied"), family!("llama_tied"), family!("qwen2"), family!("gpt2")];

impl Family {
    async fn model(&self) -> Model {
        let source = Source::memory("model.safetensors", self.weights.to_vec());
        let catalog = Catalog::from_sources(vec![source]).await.unwrap();
        Model::new(ModelConfig::parse("config.json", self.config).unwrap(), catalog).unwrap()
    }
}

async fn device() -> Device {
    Device::open(&DeviceChoice::from_env()).await.expect("the tests need a GPU adapter")
}

/// Tensors of a file.
struct Tensors(Catalog);

impl Tensors {
    async fn of(bytes: &[u8]) -> Tensors {
        Tensors(Catalog::from_sources(vec![Source::memory("values", bytes.to_vec())]).await.unwrap())
    }

    async fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.0.read(self.0.find(name).unwrap()).await.unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    async fn ints(&self, name: &str) -> Vec<i32> {
        let id = self.0.find(name).unwrap();
        let (size, bytes) = (self.0.weight(id).dtype.size() as usize, self.0.read(id).await.unwrap());
        bytes.chunks_exact(size).map(|b| i32::from_le_bytes(b[..4].try_into().unwrap())).collect()
    }
}

fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst =
        got.iter().zip(want).map(|(g, w)| if g.is_nan() { f32::MAX } else { (g - w).abs() }).fold(0.0, f32::max);
    assert!(worst <= tolerance, "{what}: off by {worst}, allowed is {tolerance}");
}

both! {
    async fn the_reference_models_give_their_logits_and_loss_at_two_budgets_to_the_same_bits() {
        let device = device().await;
        for family in &FAMILIES {
            let (model, want) = (family.model().await, Tensors::of(family.values).await);
            let ids = want.ints("input_ids").await;
            let bucket = Bucket { rows: 2, tokens: 32 };
            let labels: Vec<i32> = ids.chunks(32).flat_map(|r| r[1..].iter().copied().chain([-100])).collect();
            let weights: Vec<f32> = labels.iter().map(|l| if *l < 0 { 0.0 } else { 1.0 / 62.0 }).collect();
            let inputs = Inputs::batch(&model, bucket, &ids, &labels, &weights).unwrap();
            let mut bits: Vec<Vec<u8>> = Vec::new();
            for budget in [Budget::All, Budget::Floor] {
                let program = [inspect(&model, None, bucket).unwrap()];
                let set =
                    compile_with(&program, model.catalog(), device.caps(), budget, Options::default()).unwrap();
                let named = inputs.of_plan(&set.plans[0]);
                let mut session = Session::new(&device, model.catalog(), set.clone()).await.unwrap();
                let out = session.run(0, &named, &Cancel::new(), &mut NoEvents).await.unwrap();
                close(family.name, &out.f32("logits").unwrap(), &want.f32("logits").await, LOGITS);
                close(family.name, &out.f32("loss").unwrap(), &want.f32("loss").await, LOSS);
                bits.push(out.bytes("logits").unwrap().to_vec());
            }
            assert!(bits[0] == bits[1], "{}: the bits differ among budgets", family.name);
        }
    }
}

/// Logits of the last tokens' first entries with an adapter that is written in PEFT's format and read again.
async fn logits_of_its_file(
    device: &Device,
    model: &Model,
    adapter: &Adapter,
    values: &[Vec<f32>],
    batch: &Micro,
) -> Vec<f32> {
    let file = Source::memory("adapter", adapter.weights_file(values).unwrap());
    let weights = Catalog::from_sources(vec![file]).await.unwrap();
    let (adapter, values) = Adapter::read("config", &adapter.config_json("base"), &weights, model).await.unwrap();
    let program = [inspect(model, Some(&adapter), batch.bucket).unwrap()];
    let set = compile_with(&program, model.catalog(), device.caps(), Budget::Floor, Options::default()).unwrap();
    let weights = vec![1.0; batch.labels.len()];
    let inputs = Inputs::batch(model, batch.bucket, &batch.ids, &batch.labels, &weights).unwrap();
    let mut session = Session::new(device, model.catalog(), set.clone()).await.unwrap();
    adapter.install(&mut session, &values).await.unwrap();
    let named = inputs.of_plan(&set.plans[0]);
    let out = session.run(0, &named, &Cancel::new(), &mut NoEvents).await.unwrap();
    let all = out.f32("logits").unwrap();
    all[all.len() - model.config().vocabulary as usize..][..8].to_vec()
}

/// Trains and gives losses and the adapter's values.
async fn train(
    device: &Device,
    model: &Model,
    adapter: &Adapter,
    first: &[Vec<f32>],
    windows: &[Micro],
    budget: Budget,
) -> (Vec<f64>, Vec<Vec<f32>>) {
    let spec = RunSpec {
        buckets: vec![windows[0].bucket],
        evaluations: Vec::new(),
        accumulation: 1,
        writer: None,
        adamw: AdamW::default(),
    };
    let plan = RunPlan::new(model, Some(adapter), &spec, device.caps(), budget, Options::default()).unwrap();
    let planned = plan.set.planned_peak();
    let before = device.active_memory();
    device.reset_peak_memory();
    let mut trainer = Trainer::new(device, model, adapter, &spec, plan, first).await.unwrap();
    let mut losses = Vec::new();
    for window in windows {
        let window = std::slice::from_ref(window);
        losses.push(trainer.step(window, 2e-3, &Cancel::new(), &mut NoEvents).await.unwrap().loss);
    }
    assert_eq!(device.peak_memory() - before, planned, "measured is planned");
    (losses, trainer.values().await.unwrap())
}

both! {
    async fn fifty_steps_at_shapes_that_are_no_squares_have_the_same_bits_at_two_budgets_and_the_losses_of_the_native_engine() {
        let device = device().await;
        let family = &FAMILIES[2];
        let model = family.model().await;
        let spec = LoraSpec { rank: 3, dropout: 0.1, targets: Targets::AllLinear, ..LoraSpec::default() };
        let adapter = Adapter::new(&model, spec).unwrap();
        let bucket = Bucket { rows: 3, tokens: 13 };
        let vocabulary = model.config().vocabulary as i32;
        let windows: Vec<Micro> = (0..50)
            .map(|step| {
                let token = |i: i32| (step % 5 * 31 + i * 17) % vocabulary;
                let ids: Vec<i32> = (0..39).map(token).collect();
                let label = |i: i32| if i % 13 == 12 || i % 7 == 3 { -100 } else { token(i + 1) };
                Micro { bucket, ids, labels: (0..39).map(label).collect(), rows: vec![step, step + 1, step + 2] }
            })
            .collect();
        let first = adapter.initial(3);
        let (losses, values) = train(&device, &model, &adapter, &first, &windows, Budget::All).await;
        let floor = train(&device, &model, &adapter, &first, &windows, Budget::Floor).await;
        assert!(floor == (losses.clone(), values.clone()), "the bits differ between budgets");
        let logits = logits_of_its_file(&device, &model, &adapter, &values, &windows[0]).await;
        close("logits with the adapter's file", &logits, &NATIVE_LOGITS, APART as f32);
        for (i, (got, want)) in losses.iter().zip(NATIVE_FIFTY).enumerate() {
            assert!((got - want).abs() < APART, "step {i}: {got}, natively {want}");
        }
    }
}

both! {
    #[ignore = "takes minutes on two cores"]
    async fn twenty_steps_of_the_demo_give_the_losses_of_the_reference_and_of_the_native_engine() {
        let device = device().await;
        let tiny = Family {
            name: "tiny",
            config: include_bytes!("../../native/assets/tiny-shakespeare-llama/config.json"),
            weights: include_bytes!("../../native/assets/tiny-shakespeare-llama/model.safetensors"),
            values: reference!("tiny_shakespeare_lora/batches.safetensors"),
        };
        let (model, batches) = (tiny.model().await, Tensors::of(tiny.values).await);
        let weights = reference!("tiny_shakespeare_lora/init/adapter_model.safetensors");
        let weights = Catalog::from_sources(vec![Source::memory("init", weights.to_vec())]).await.unwrap();
        let config = include_str!("../../tests/fixtures/refs/tiny_shakespeare_lora/init/adapter_config.json");
        let (adapter, first) = Adapter::read("init", config, &weights, &model).await.unwrap();
        let (ids, lengths) = (batches.ints("input_ids").await, batches.ints("lengths").await);
        let bucket = Bucket { rows: 4, tokens: 64 };
        let windows: Vec<Micro> = (0..20)
            .map(|step| {
                let ids = ids[step * 256..][..256].to_vec();
                let row = |(row, length): (&[i32], &i32)| -> Vec<i32> {
                    (0..64).map(|i| if i + 1 < *length as usize { row[i + 1] } else { -100 }).collect()
                };
                let labels = ids.chunks(64).zip(&lengths[step * 4..]).flat_map(row).collect();
                Micro { bucket, ids, labels, rows: vec![0, 1, 2, 3] }
            })
            .collect();
        let (losses, _) = train(&device, &model, &adapter, &first, &windows, Budget::Percent(33.0)).await;
        let reference = batches.f32("losses").await;
        for (i, got) in losses.iter().enumerate() {
            for want in [f64::from(reference[i]), NATIVE_TWENTY[i]] {
                assert!((got - want).abs() < APART, "step {i}: {got}, wanted {want}");
            }
        }
    }
}

/// Losses of the native engine on lavapipe.
const NATIVE_FIFTY: [f64; 50] = [
    8.990093, 8.955579, 8.594785, 9.064210, 9.352243, 7.077158, 7.502867, 7.378169, 8.018772, 8.379570, 6.013990,
    6.405734, 6.149420, 6.996434, 7.311689, 5.051298, 5.422001, 4.963346, 6.045394, 6.199485, 4.128122, 4.798166,
    4.185517, 4.976358, 5.046244, 3.386849, 4.036000, 3.412004, 4.209805, 4.083115, 2.860548, 3.376600, 2.914580,
    3.383794, 3.341441, 2.370480, 2.954143, 2.437283, 2.580984, 2.800630, 1.981557, 2.433625, 2.052021, 1.939090,
    2.068656, 1.490297, 1.997326, 1.692971, 1.533670, 1.649037,
];
/// The first logits of the last token with the adapter of these fifty steps.
const NATIVE_LOGITS: [f32; 8] = [0.267003, 2.103168, 4.506673, 0.600865, 0.800537, -2.310114, -1.744831, -3.357608];
const NATIVE_TWENTY: [f64; 20] = [
    6.167365, 5.752494, 5.646518, 5.485892, 4.561092, 5.346922, 4.815807, 5.020786, 5.011596, 4.528877, 4.450969,
    4.810315, 4.509091, 4.297706, 4.009188, 3.981399, 4.163273, 4.086517, 3.770541, 3.875751,
];
