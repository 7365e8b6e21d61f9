//! `config.json`: what a model is, in one struct for all families.
//!
//! A configuration that is half understood gives a model that runs and answers wrongly. So every field is either read,
//! or stands in a list of fields that cannot change the result, or is refused by name: a field invented tomorrow is an
//! error, never ignored. Both spellings are read: the hub's (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
//! transformers 5 (`rope_parameters`, `dtype`). Absent fields have the defaults of transformers' configuration classes.

mod fields;
#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::llm::hub::read_small;
use crate::nn::RopeScaling;
use crate::weights::Source;

pub(crate) use fields::Fields;

/// The most bytes of a `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The largest width, count or vocabulary: beyond all models, and small enough that products of two fit in 64 bits.
const MOST: u64 = 1 << 30;
/// The most blocks.
const MOST_LAYERS: u64 = 1 << 16;

/// What a model's blocks look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 1 to 3, SmolLM2, TinyLlama (`LlamaForCausalLM`).
    Llama,
    /// Mistral (`MistralForCausalLM`): Llama with a sliding window.
    Mistral,
    /// Qwen2 and 2.5 (`Qwen2ForCausalLM`): Llama with biases on q, k, v.
    Qwen2,
    /// Qwen3 (`Qwen3ForCausalLM`): Llama with norms on q and k.
    Qwen3,
    /// GPT-2 (`GPT2LMHeadModel`).
    Gpt2,
}

impl Family {
    const ALL: [Family; 5] = [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3, Family::Gpt2];

    /// The name in `architectures`.
    pub fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
            Family::Gpt2 => "GPT2LMHeadModel",
        }
    }

    /// The name in `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Gpt2 => "gpt2",
        }
    }
}

/// The function within the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// Gelu by its tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// Gelu by the error function (`gelu`).
    GeluErf,
    /// max(x, 0).
    Relu,
}

/// Rotary positions. GPT-2 has none; its value is not used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// How frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

/// Which linear layers have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub struct Biases {
    /// q, k and v.
    pub qkv: bool,
    /// The output of attention.
    pub o: bool,
    /// The feed-forward part.
    pub mlp: bool,
}

/// Everything that a family's builder needs. Sizes are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// What the blocks look like.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Blocks.
    pub layers: u64,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Features of a head; even where positions are rotary. `heads · head_dim` need not be `hidden`.
    pub head_dim: u64,
    /// Width of the feed-forward part.
    pub ffn: u64,
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// The longest context the model was made for.
    pub max_positions: u64,
    /// Epsilon of the norms.
    pub eps: f64,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Which linear layers have a bias.
    pub biases: Biases,
    /// Whether q and k are normalised per head.
    pub qk_norm: bool,
    /// The function within the feed-forward part.
    pub activation: Activation,
    /// Keys a query sees at most, itself included, in the blocks of `windowed`.
    pub sliding_window: Option<u64>,
    /// The blocks with the sliding window; empty without one.
    pub windowed: Vec<u64>,
    /// The token a text begins with, where the model has one.
    pub bos: Option<u32>,
    /// The tokens that end a text, the first being the one appended in training.
    pub eos: Vec<u32>,
    /// What was read and is not done, in words for the user: dropout of the base model.
    pub notes: Vec<String>,
}

/// Fields that say how the file was made, or how transformers should run or sample: none changes what the model computes.
const IGNORED: &[&str] = &[
    // Origin.
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "tokenizer_class",
    "unsloth_fixed",
    "unsloth_version",
    "is_llama_config",
    // How transformers runs it.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
    "tf_legacy_loss",
    // Rows cut for tensor parallelism in old versions: the same sums.
    "pretraining_tp",
    // Beginning of a training from scratch.
    "initializer_range",
    // Other heads and tasks.
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "prefix",
    "problem_type",
    "task_specific_params",
    // Tokens that neither generation nor training reads from here.
    "decoder_start_token_id",
    "pad_token_id",
    "sep_token_id",
    // Sampling defaults of old files: `generate` has flags.
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// GPT-2's fields of the classification head, of which a language model has none, and an old name of `n_positions`.
const IGNORED_GPT2: &[&str] = &[
    "n_ctx",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

impl ModelConfig {
    /// Reads `config.json`.
    ///
    /// Errors: [`crate::Error::Format`] as [`ModelConfig::parse`] says, or if it has more than 1 MiB; what
    /// [`Source::fill`] returns.
    pub async fn read(source: &Source) -> Result<ModelConfig> {
        ModelConfig::parse(source.name(), &read_small(source, MAX_CONFIG_BYTES).await?)
    }

    /// Reads the text of a `config.json`. `file` names it in errors.
    ///
    /// Errors: [`crate::Error::Format`] naming the file and the field, if it is no JSON object, if a field is missing,
    /// out of range or contradicts another, and for every architecture, value or field that is not supported.
    pub fn parse(file: &str, text: &[u8]) -> Result<ModelConfig> {
        let mut fields = Fields::parse(file, text)?;
        let family = family(&mut fields)?;
        fields.ignore(IGNORED);
        for field in ["add_cross_attention", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder"] {
            // A decoder of another model's encoder masks and reads otherwise.
            fields.only(field, false)?;
        }
        for field in ["auto_map", "cross_attention_hidden_size", "pruned_heads", "quantization_config"] {
            fields.nothing(field)?;
        }
        let bos = fields.ids("bos_token_id")?.first().copied();
        let eos = fields.ids("eos_token_id")?;
        let mut config = match family {
            Family::Gpt2 => gpt2(&mut fields)?,
            _ => llama(family, &mut fields)?,
        };
        (config.bos, config.eos) = (bos, eos);
        fields.finish()?;
        Ok(config)
    }

    /// Adds the end tokens of the text of a `generation_config.json`: chat models often name more there.
    ///
    /// Errors: [`crate::Error::Format`] if it is no JSON object or `eos_token_id` holds no ids. Its other fields are
    /// sampling defaults, which the caller states himself.
    pub fn add_end_tokens(&mut self, file: &str, text: &[u8]) -> Result<()> {
        for id in Fields::parse(file, text)?.ids("eos_token_id")? {
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        Ok(())
    }

    /// Keys that a query of this block sees at most, itself included; `None`: all before it.
    pub fn window(&self, block: usize) -> Option<u64> {
        self.sliding_window.filter(|_| self.windowed.binary_search(&(block as u64)).is_ok())
    }
}

fn family(fields: &mut Fields) -> Result<Family> {
    let supported = || Family::ALL.map(Family::architecture).join(", ");
    let architectures = fields.texts("architectures")?.unwrap_or_default();
    let model_type = fields.text("model_type")?;
    let family = match (architectures.as_slice(), &model_type) {
        ([], None) => return Err(fields.error("architectures", "it is missing, and so is `model_type`")),
        ([], Some(name)) => {
            let found = Family::ALL.into_iter().find(|f| f.model_type() == name);
            let refused =
                || fields.error("model_type", format_args!("`{name}` is not supported; what is: {}", supported()));
            found.ok_or_else(refused)?
        }
        ([name], _) => {
            let found = Family::ALL.into_iter().find(|f| f.architecture() == name);
            let refused =
                || fields.error("architectures", format_args!("`{name}` is not supported; what is: {}", supported()));
            found.ok_or_else(refused)?
        }
        (several, _) => {
            return Err(fields.error("architectures", format_args!("expected one, got {}", several.join(", "))));
        }
    };
    match model_type {
        Some(name) if name != family.model_type() => {
            let reason = format_args!("`{name}` contradicts `architectures`, which is {}", family.architecture());
            Err(fields.error("model_type", reason))
        }
        _ => Ok(family),
    }
}

fn llama(family: Family, fields: &mut Fields) -> Result<ModelConfig> {
    let hidden = fields.required("hidden_size", 1..=MOST)?;
    let layers = fields.required("num_hidden_layers", 1..=MOST_LAYERS)?;
    let heads = fields.required("num_attention_heads", 1..=MOST)?;
    let kv_heads = fields.integer("num_key_value_heads", 1..=MOST)?.unwrap_or(heads);
    if heads % kv_heads != 0 {
        let reason = format_args!("{kv_heads} does not divide num_attention_heads, which is {heads}");
        return Err(fields.error("num_key_value_heads", reason));
    }
    let head_dim = match fields.integer("head_dim", 1..=MOST)? {
        Some(dim) => dim,
        None if family == Family::Qwen3 => 128,
        None if hidden % heads == 0 => hidden / heads,
        None => {
            return Err(fields
                .error("num_attention_heads", format_args!("{heads} does not divide hidden_size, which is {hidden}")));
        }
    };
    if head_dim % 2 != 0 {
        return Err(fields.error("head_dim", format_args!("rotary positions need pairs of features, got {head_dim}")));
    }
    let ffn = fields.required("intermediate_size", 1..=MOST)?;
    let vocabulary = fields.required("vocab_size", 1..=MOST)?;
    let max_positions = fields.integer("max_position_embeddings", 1..=u64::from(u32::MAX))?;
    let eps = epsilon(fields, "rms_norm_eps", 1e-6)?;
    let attention_bias = match family {
        Family::Llama | Family::Qwen3 => fields.flag("attention_bias")?.unwrap_or(false),
        _ => false,
    };
    let biases = match family {
        Family::Qwen2 => Biases { qkv: true, o: false, mlp: false },
        Family::Llama => {
            Biases { qkv: attention_bias, o: attention_bias, mlp: fields.flag("mlp_bias")?.unwrap_or(false) }
        }
        _ => Biases { qkv: attention_bias, o: attention_bias, mlp: false },
    };
    for field in ["attention_bias", "mlp_bias", "rope_interleaved", "use_mrope", "use_qk_norm"] {
        // Where the family has such a choice, it was taken above.
        fields.only(field, false)?;
    }
    let rope = rope(fields)?;
    let activation = activation(fields, "hidden_act", Activation::Silu)?;
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(false);
    let (sliding_window, windowed) = windows(family, layers, fields)?;
    let notes = dropouts(fields, &["attention_dropout", "hidden_dropout"])?;
    Ok(ModelConfig {
        family,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocabulary,
        max_positions: max_positions.unwrap_or(if family == Family::Llama { 2048 } else { 32_768 }),
        eps,
        rope,
        tied,
        biases,
        qk_norm: family == Family::Qwen3,
        activation,
        sliding_window,
        windowed,
        bos: None,
        eos: Vec::new(),
        notes,
    })
}

fn gpt2(fields: &mut Fields) -> Result<ModelConfig> {
    fields.ignore(IGNORED_GPT2);
    let hidden = fields.required("n_embd", 1..=MOST)?;
    let layers = fields.required("n_layer", 1..=MOST_LAYERS)?;
    let heads = fields.required("n_head", 1..=MOST)?;
    if hidden % heads != 0 {
        return Err(fields.error("n_head", format_args!("{heads} does not divide n_embd, which is {hidden}")));
    }
    let ffn = fields.integer("n_inner", 1..=MOST)?.unwrap_or(4 * hidden);
    let vocabulary = fields.required("vocab_size", 1..=MOST)?;
    let max_positions = fields.required("n_positions", 1..=MOST)?;
    let eps = epsilon(fields, "layer_norm_epsilon", 1e-5)?;
    fields.only("scale_attn_weights", true)?;
    fields.only("scale_attn_by_inverse_layer_idx", false)?;
    fields.only("reorder_and_upcast_attn", false)?;
    let activation = activation(fields, "activation_function", Activation::GeluTanh)?;
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(true);
    let notes = dropouts(fields, &["attn_pdrop", "embd_pdrop", "resid_pdrop"])?;
    Ok(ModelConfig {
        family: Family::Gpt2,
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        ffn,
        vocabulary,
        max_positions,
        eps,
        rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::None },
        tied,
        biases: Biases { qkv: true, o: true, mlp: true },
        qk_norm: false,
        activation,
        sliding_window: None,
        windowed: Vec::new(),
        bos: None,
        eos: Vec::new(),
        notes,
    })
}

fn epsilon(fields: &mut Fields, field: &str, default: f64) -> Result<f64> {
    match fields.positive(field)? {
        Some(eps) if eps >= 1.0 => Err(fields.error(field, format_args!("expected a number below 1, got {eps}"))),
        eps => Ok(eps.unwrap_or(default)),
    }
}

fn activation(fields: &mut Fields, field: &str, default: Activation) -> Result<Activation> {
    match fields.text(field)?.as_deref() {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu") => Ok(Activation::GeluErf),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("relu") => Ok(Activation::Relu),
        Some(name) => {
            let reason =
                format_args!("`{name}` is not supported; what is: silu, gelu, gelu_new, gelu_pytorch_tanh, relu");
            Err(fields.error(field, reason))
        }
    }
}

/// Dropout of the base model is not done: in inference there is none, and LoRA training has its own. That is said.
fn dropouts(fields: &mut Fields, names: &[&str]) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for name in names {
        if let Some(rate) = fields.number(name)? {
            if rate > 1.0 {
                return Err(fields.error(name, format_args!("expected a rate from 0 to 1, got {rate}")));
            }
            if rate > 0.0 {
                notes.push(format!("{name} is {rate}: the base model runs without its dropout, in training too"));
            }
        }
    }
    Ok(notes)
}

/// Rotary positions from `rope_parameters`, or from `rope_theta` and `rope_scaling`; where both stand, they must agree.
fn rope(fields: &mut Fields) -> Result<RopeConfig> {
    let theta = fields.positive("rope_theta")?;
    let only_whole = |fields: &mut Fields| match fields.positive("partial_rotary_factor")? {
        Some(part) if part != 1.0 => {
            let reason = format_args!("{part} changes the result and is not supported; only 1 is");
            Err(fields.error("partial_rotary_factor", reason))
        }
        _ => Ok(()),
    };
    only_whole(fields)?;
    let mut found: Option<RopeConfig> = None;
    for name in ["rope_parameters", "rope_scaling"] {
        let Some(mut inner) = fields.object(name)? else {
            continue;
        };
        only_whole(&mut inner)?;
        let own = inner.positive("rope_theta")?;
        if let (Some(own), Some(theta)) = (own, theta)
            && own != theta
        {
            return Err(
                inner.error("rope_theta", format_args!("{own} contradicts the `rope_theta` outside, which is {theta}"))
            );
        }
        let scaling = scaling(&mut inner)?;
        inner.finish()?;
        let rope = RopeConfig { theta: own.or(theta).unwrap_or(10_000.0), scaling };
        if found.is_some_and(|before| before != rope) {
            return Err(fields.error(name, "it contradicts `rope_parameters`"));
        }
        found = Some(rope);
    }
    Ok(found.unwrap_or(RopeConfig { theta: theta.unwrap_or(10_000.0), scaling: RopeScaling::None }))
}

fn scaling(inner: &mut Fields) -> Result<RopeScaling> {
    let (new, old) = (inner.text("rope_type")?, inner.text("type")?);
    if let (Some(new), Some(old)) = (&new, &old)
        && new != old
    {
        return Err(inner.error("rope_type", format_args!("`{new}` contradicts `type`, which is `{old}`")));
    }
    let need = |inner: &mut Fields, name: &str| inner.positive(name)?.ok_or_else(|| inner.error(name, "it is missing"));
    match new.or(old).as_deref() {
        Some("default") | None if !inner.has("factor") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need(inner, "factor")? }),
        Some("llama3") => {
            let factor = need(inner, "factor")?;
            let (low, high) = (need(inner, "low_freq_factor")?, need(inner, "high_freq_factor")?);
            let original = need(inner, "original_max_position_embeddings")?;
            if low >= high {
                let reason = format_args!("{high} is not above low_freq_factor, which is {low}");
                return Err(inner.error("high_freq_factor", reason));
            }
            Ok(RopeScaling::Llama3 { factor, low, high, original })
        }
        Some("default") => Err(inner.error("factor", "it has no meaning with rope type `default`")),
        None => Err(inner.error("rope_type", "it is missing")),
        Some(name) => {
            Err(inner.error("rope_type", format_args!("`{name}` is not supported; what is: default, linear, llama3")))
        }
    }
}

/// The sliding window and the blocks that have it.
fn windows(family: Family, layers: u64, fields: &mut Fields) -> Result<(Option<u64>, Vec<u64>)> {
    // Mistral's class has 4096 where the file says nothing, and no window where it says null.
    let silent = family == Family::Mistral && !fields.has("sliding_window");
    let size = fields.integer("sliding_window", 1..=u64::from(u32::MAX))?.or(silent.then_some(4096));
    let types = fields.texts("layer_types")?;
    let first = fields.integer("max_window_layers", 0..=MOST)?;
    let used = fields.flag("use_sliding_window")?;
    let window = match family {
        Family::Mistral if used != Some(false) => size,
        Family::Mistral => {
            return Err(fields.error("use_sliding_window", "Mistral has no such choice: say `sliding_window: null`"));
        }
        Family::Qwen2 | Family::Qwen3 => size.filter(|_| used == Some(true)),
        _ if size.is_some() || used == Some(true) => {
            return Err(fields.error("sliding_window", format_args!("{} has none", family.architecture())));
        }
        _ => None,
    };
    let windowed: Vec<u64> = match types {
        None => {
            let first = if family == Family::Mistral { 0 } else { first.unwrap_or(28) };
            (first.min(layers)..layers).collect()
        }
        Some(types) => {
            if types.len() as u64 != layers {
                let reason = format_args!("{} entries for {layers} layers", types.len());
                return Err(fields.error("layer_types", reason));
            }
            let mut windowed = Vec::new();
            for (layer, kind) in (0..).zip(&types) {
                match kind.as_str() {
                    "full_attention" => {}
                    "sliding_attention" if window.is_some() => windowed.push(layer),
                    "sliding_attention" => {
                        let reason =
                            format_args!("layer {layer} is `sliding_attention`, but there is no sliding window");
                        return Err(fields.error("layer_types", reason));
                    }
                    other => return Err(fields.error("layer_types", format_args!("`{other}` is not supported"))),
                }
            }
            windowed
        }
    };
    match window {
        Some(size) if !windowed.is_empty() => Ok((Some(size), windowed)),
        _ => Ok((None, Vec::new())),
    }
}
