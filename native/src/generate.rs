//! `ebbtide generate`: text from a model, as it comes, with the base streamed where it does not fit.
//!
//! Standard output carries the text and nothing else (with `--json`, an event a line); figures go to standard error.

mod chat;
mod speak;

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use ebbtide::caps::Caps;
use ebbtide::llm::adapters::{Adapter, Values};
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::generator::{Generator, Space};
use ebbtide::llm::models::Model;
use ebbtide::{Cancel, Error};

use crate::engine;
use crate::model::{self, ModelArgs};
use crate::text::Texts;
use crate::witness::Witness;

/// Arguments of `ebbtide generate`.
#[derive(Args, Clone, Debug)]
#[command(group(ArgGroup::new("task").required(true).multiple(true).args(["prompt", "chat"])), after_help = "\
Examples:
  ebbtide generate --model my-model --prompt 'Once upon a time'
  ebbtide generate --model my-model --chat                          a conversation; /help lists its commands
  ebbtide generate --model my-model --chat --prompt 'What is the capital of France?'
  ebbtide generate --model my-model --adapter my-adapter --prompt - < prompt.txt
  ebbtide generate --model my-model --budget 6GiB --temperature 0.7 --top-p 0.9 --seed 1 --prompt 'The sea'
  ebbtide generate --model my-model --chat --json < messages.json   [{\"role\": \"user\", \"content\": \"Hello\"}]

The text goes to standard output, figures to standard error. With --json: one event a line, `plan`, then `token` for each
token and a `summary` for each text.")]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to go on from; `-`: standard input. With --chat: one message to be answered.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Talk with the model by its chat template. Not at a terminal: messages as JSON, or one message a line.
    #[arg(long)]
    chat: bool,
    /// The system message of the chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// An adapter in PEFT's format. Several: a prompt is gone on from with each; in a chat the first is in use, and
    /// /adapter changes it.
    #[arg(long, visible_alias = "adapter-path", value_name = "[NAME=]FOLDER")]
    adapter: Vec<String>,
    /// The most tokens of a text.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Tokens of prompt and text together, for which there is a cache. Default: what the prompt needs; in a chat 2048.
    #[arg(long, value_name = "TOKENS")]
    max_context: Option<u64>,
    /// 0: always the likeliest token. Above: the higher, the bolder.
    #[arg(long, visible_alias = "temp", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Choose among so many of the likeliest tokens only; 0: all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Choose among the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Above 1: tokens that occurred become less likely.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f32,
    /// Seed of the choices: the same seed, the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto.
    #[arg(long, default_value = "auto", allow_hyphen_values = true)]
    budget: String,
    /// Part of the name of the adapter to use.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Print events, one a line.
    #[arg(long)]
    pub json: bool,
}

impl GenerateArgs {
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}

/// An adapter of the command line: a name, and where it lies.
fn named(adapter: &str) -> (String, PathBuf) {
    if let Some((name, folder)) = adapter.split_once('=')
        && !name.is_empty()
        && !name.contains(['/', '\\'])
    {
        return (name.into(), folder.into());
    }
    let path = Path::new(adapter);
    let name = path.file_name().map_or(adapter.into(), |n| n.to_string_lossy().into_owned());
    (name, path.into())
}

/// Runs the command.
pub fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    engine::wait(generate(args))
}

/// What is to be written.
enum Task {
    /// One text.
    Once(Vec<i32>),
    /// A conversation.
    Chat,
}

async fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    args.sampling().check()?;
    let folder = args.model.folder().await?;
    let model = model::open(&folder).await?;
    let texts = Texts::open(&folder, model.config()).await?;
    let mut adapters: Vec<(String, (Adapter, Values))> = Vec::new();
    for adapter in &args.adapter {
        let (name, folder) = named(adapter);
        if adapters.iter().any(|(n, _)| *n == name) {
            let reason = format!("two are called `{name}`; give them names: --adapter NAME=FOLDER");
            return Err(Error::Invalid { what: "--adapter".into(), reason }.into());
        }
        adapters.push((name, Adapter::open(&folder, &model).await?));
    }
    let task = match &args.prompt {
        None => Task::Chat,
        Some(text) => {
            let text = if text == "-" { std::io::read_to_string(std::io::stdin())? } else { text.clone() };
            Task::Once(if args.chat { texts.chat(&chat::opening(args, Some(&text)))? } else { texts.prompt(&text)? })
        }
    };
    let space = space(args, &model, &task)?;
    // The plans come first: a budget that cannot be kept is refused before any GPU work.
    for adapter in adapters.iter().map(|(_, (adapter, _))| Some(adapter)).chain(adapters.is_empty().then_some(None)) {
        space.plan(&model, adapter, &Caps::webgpu_defaults())?;
    }
    if let Task::Chat = task {
        texts.chat(&chat::opening(args, Some("")))?;
    }

    let cancel = engine::cancel_on_ctrl_c();
    let device = engine::open_device(args.device.as_deref()).await?;
    let witness = Witness::start();
    device.reset_peak_memory();
    let mut first = adapters.first().map(|(name, _)| name.clone());
    let names: Vec<String> = adapters.iter().map(|(name, _)| name.clone()).collect();
    let mut generator = Generator::with(&device, model, space, adapters, first.take().as_deref()).await?;
    let mut speaker = speak::Speaker::new(args.json, &device, witness);
    speaker.plan(generator.set()?, space.context);
    match task {
        Task::Chat => chat::run(args, &texts, &mut generator, &mut speaker, space.context, &cancel).await,
        Task::Once(prompt) => {
            for i in 0..names.len().max(1) {
                let name = names.get(i).map(String::as_str);
                generator.select(name).await?;
                if names.len() > 1 {
                    speaker.heading(name);
                }
                answer(args, &texts, &mut generator, &mut speaker, &prompt, &cancel).await?;
            }
            Ok(())
        }
    }
}

/// Tokens and memory for a task.
fn space(args: &GenerateArgs, model: &Model, task: &Task) -> anyhow::Result<Space> {
    let (budget, _) = engine::budget(&args.budget, args.device.as_deref())?;
    let most = model.config().max_positions;
    let refuse = |what: &str, reason: String| Err(Error::Invalid { what: what.into(), reason }.into());
    let (context, chunk) = match task {
        Task::Chat => (args.max_context.unwrap_or(2048.min(most)), 64),
        Task::Once(prompt) => {
            let prompt = prompt.len() as u64;
            if prompt == 0 {
                return refuse("--prompt", "it is empty; there is nothing to go on from".into());
            }
            let wanted = prompt + u64::from(args.max_tokens);
            (args.max_context.unwrap_or(wanted).min(wanted), prompt.next_power_of_two().min(256))
        }
    };
    // Without a word about it, a text ends where the model does.
    let context = context.min(most);
    if context < 2 || args.max_context.is_some_and(|asked| asked > most) {
        return refuse("--max-context", format!("2 to {most} tokens are possible with this model"));
    }
    if let Task::Once(prompt) = task
        && prompt.len() as u64 >= context
    {
        let reason = format!("it has {} tokens, which leaves no room in a context of {context}", prompt.len());
        return refuse("--prompt", reason);
    }
    Ok(Space { budget, context, chunk })
}

/// Writes one text behind a prompt; gives its tokens.
async fn answer(
    args: &GenerateArgs,
    texts: &Texts,
    generator: &mut Generator,
    speaker: &mut speak::Speaker,
    prompt: &[i32],
    cancel: &Cancel,
) -> anyhow::Result<String> {
    let mut answer = speaker.begin(&texts.tokenizer, prompt.len(), generator.active());
    let (mut counts, count) = (speak::Counts::default(), args.max_tokens as usize);
    let mut each = |token: i32| answer.token(token);
    let mut events = |event: ebbtide::Event| counts.event(&event);
    let sampling = args.sampling();
    let result = generator.write(prompt, count, &texts.stop, &sampling, cancel, &mut events, &mut each).await;
    let why = match &result {
        Ok(_) if answer.tokens() >= count => "length",
        Ok(_) if prompt.len() + answer.tokens() >= speaker.context() => "context",
        Ok(_) => "end",
        Err(Error::Cancelled) => "interrupted",
        Err(_) => "error",
    };
    let planned = generator.set().map_or(0, |s| s.planned_peak());
    let text = answer.finish(why, &counts, planned)?;
    result?;
    Ok(text)
}
