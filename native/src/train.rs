//! `ebbtide train`: a LoRA adapter over a model, within a budget.
//!
//! Everything that can be refused is refused before any GPU work: flags, files, rows, places to write to, the budget. The
//! loop itself is the library's ([`ebbtide::llm::run`]); here are its files, its progress and its report.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;
use ebbtide::event::{EventSink, Step};
use ebbtide::llm::adapters::{Adapter, CONFIG_FILE, Values, WEIGHTS_FILE};
use ebbtide::llm::run::{Host, Run, Saved};
use ebbtide::llm::trainer::Checkpoint;
use ebbtide::rt::file::{io_error, is_file, make_folder, save_atomically};
use ebbtide::{Cancel, Caps, Error, Event, Result, Source};

use crate::engine::{self, short};
use crate::progress::Progress;
use crate::report::Recorder;
use crate::speeds::Speeds;
use crate::training::{OptimizerArgs, Training, TrainingArgs};
use crate::witness::Witness;

/// Name of the checkpoint in the adapter's folder.
pub const CHECKPOINT_FILE: &str = "checkpoint.safetensors";

/// Arguments of `ebbtide train`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide train --model my-model --data my-data --iters 600 --budget 6GiB
  ebbtide train --model org/name --data rows.jsonl --mask-prompt --budget 50% --adapter-path my-adapter
  ebbtide train --model my-model --data my-data --resume adapters      goes on where it was stopped
  ebbtide train --model my-model --data my-data --json | jq 'select(.event == \"step\").loss'

`ebbtide plan` with the same flags says beforehand what it will need. Ctrl-C saves and says how to go on.")]
pub struct TrainArgs {
    #[command(flatten)]
    pub training: TrainingArgs,
    #[command(flatten)]
    pub optimizer: OptimizerArgs,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto.
    #[arg(long, value_name = "BUDGET", default_value = "auto", allow_hyphen_values = true, help_heading = "Memory")]
    pub budget: String,
    /// Part of the name of the GPU adapter to use.
    #[arg(long, value_name = "NAME", help_heading = "Memory")]
    pub device: Option<String>,
    /// Folder for the adapter (in PEFT's format) and the checkpoint.
    #[arg(long, value_name = "FOLDER", default_value = "adapters", help_heading = "Files")]
    pub adapter_path: PathBuf,
    /// Go on from a checkpoint, or the one in this folder, to the bit as if the training had not stopped.
    #[arg(long, value_name = "PATH", help_heading = "Files")]
    pub resume: Option<PathBuf>,
    /// Begin with the values of this adapter's folder, in PEFT's format, and a fresh optimizer.
    #[arg(long, value_name = "FOLDER", conflicts_with = "resume", help_heading = "Files")]
    pub resume_adapter_file: Option<PathBuf>,
    /// Write over an adapter that is there.
    #[arg(long, help_heading = "Files")]
    pub overwrite: bool,
    /// Write report.html there: losses, memory over time, loads and evictions.
    #[arg(long, value_name = "FOLDER", help_heading = "Files")]
    pub report: Option<PathBuf>,
    /// Print one JSON object a line for each event.
    #[arg(long)]
    pub json: bool,
}

/// What a finished training says to whoever called it.
pub struct Outcome {
    /// The first step and the last.
    pub steps: Option<(Step, Step)>,
    /// The page, where one was asked for.
    pub report: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &TrainArgs) -> anyhow::Result<()> {
    let cancel = engine::cancel_on_ctrl_c();
    let mut progress = Progress::new(args.json, args.optimizer.steps_per_report);
    let outcome = engine::wait(train(args, &cancel, &mut |event| progress.event(event)));
    // The bar would stand between the error and its reader.
    progress.clear();
    if let Some(page) = outcome?.report.filter(|_| !args.json) {
        println!("report: {}", page.display());
    }
    Ok(())
}

/// Trains as the arguments say; every event is shown to `show`.
pub async fn train(args: &TrainArgs, cancel: &Cancel, show: &mut dyn FnMut(&Event)) -> anyhow::Result<Outcome> {
    let (budget, why) = engine::budget(&args.budget, args.device.as_deref())?;
    let source = args.resume.as_deref().map(checkpoint).transpose()?;
    let mut training = args.training.open(&args.optimizer).await?;
    refuse_overwriting(args, &training)?;
    let mut resume = None;
    if let Some(source) = source {
        let checkpoint = Checkpoint::open(source, &training.model, &training.adapter).await?;
        training.data.accepts(&checkpoint, &training.settings)?;
        resume = Some(checkpoint);
    }
    let mut first = None;
    if let Some(folder) = &args.resume_adapter_file {
        let (adapter, values) = Adapter::open(folder, &training.model).await?;
        first = Some(begin_with(&training.adapter, &adapter, values)?);
    }
    let options = args.training.options();
    // The plan comes first: a budget that cannot be kept is refused before any GPU work.
    training.plan(&Caps::webgpu_defaults(), budget, options)?;
    let device = engine::open_device(args.device.as_deref()).await?;
    let plan = training.plan(device.caps(), budget, options)?;

    let notes = std::mem::take(&mut training.notes);
    let Training { folder, model, adapter, data, settings, .. } = training;
    let facts = vec![
        ("model".to_string(), args.training.model.model.clone()),
        ("adapter".into(), format!("{} numbers", adapter.trainable())),
        ("budget".into(), format!("{budget} = {}; the floor is {}", short(plan.set.budget), short(plan.set.floor))),
        ("GPU".into(), device.caps().adapter.clone()),
    ];
    let recorder = args.report.as_ref().map(|_| Recorder::new("A training within a budget", &plan.set, facts));
    let mut host = NativeHost {
        show,
        recorder,
        witness: Witness::start(),
        folder: args.adapter_path.clone(),
        base: base_name(&args.training.model.model, &folder),
        steps: None,
        measured: (0, 0, 0.0),
    };
    for text in why.into_iter().map(|why| format!("budget {budget}: {why}")).chain(notes) {
        host.event(Event::Note { text: text.into() });
    }
    let first = first.unwrap_or_else(|| adapter.initial(args.training.lora.seed.into()));
    let mut run = Run::begin(&device, &model, &adapter, data, settings, plan, &first, cancel, &mut host).await?;
    drop(first);
    if let Some(checkpoint) = resume {
        run.resume(&checkpoint, &mut host).await?;
    }
    let result = run.fit(cancel, &mut host).await;
    let (work, bytes, seconds) = host.measured;
    if seconds > 0.0 {
        let mut speeds = Speeds::load();
        speeds.learn(&device.caps().adapter, work, bytes, seconds);
        speeds.remember();
    }
    let report = match (&host.recorder, &args.report) {
        (Some(recorder), Some(folder)) => Some(recorder.write(folder)?),
        _ => None,
    };
    if let Err(error) = result {
        if is_file(&args.adapter_path.join(CHECKPOINT_FILE)) {
            let step = run.trainer.step_count();
            let text = format!("stopped after step {step}. To go on: {}", how_to_go_on(&args.adapter_path));
            host.event(Event::Note { text: text.into() });
        }
        return Err(error.into());
    }
    Ok(Outcome { steps: host.steps, report })
}

/// The checkpoint that `--resume` names: a file, or the one in a folder.
fn checkpoint(path: &Path) -> Result<Source> {
    Source::open(if path.is_dir() { path.join(CHECKPOINT_FILE) } else { path.into() })
}

/// Refuses to write over what is there, unless that is what is asked for, and never into the model.
fn refuse_overwriting(args: &TrainArgs, training: &Training) -> Result<()> {
    let refuse = |reason: String| {
        Err(Error::Invalid { what: format!("--adapter-path {}", args.adapter_path.display()), reason })
    };
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if same(&args.adapter_path, &training.folder) {
        return refuse("that is the model's folder; write somewhere else".into());
    }
    let goes_on =
        |path: &Path| same(&args.adapter_path, path) || path.parent().is_some_and(|p| same(&args.adapter_path, p));
    if args.overwrite || args.resume.as_deref().is_some_and(goes_on) {
        return Ok(());
    }
    let there = [CHECKPOINT_FILE, WEIGHTS_FILE, CONFIG_FILE].into_iter().find(|f| is_file(&args.adapter_path.join(f)));
    match there {
        Some(file) => refuse(format!(
            "there is a {file} already: --overwrite replaces it, --resume {} goes on with it",
            args.adapter_path.display()
        )),
        None => Ok(()),
    }
}

/// The values of a stored adapter, if it is of the same form.
fn begin_with(asked: &Adapter, stored: &Adapter, values: Values) -> Result<Values> {
    let form = |a: &Adapter| a.params().iter().map(|p| (p.name.clone(), p.shape)).collect::<Vec<_>>();
    let (a, s) = (asked.spec(), stored.spec());
    if form(asked) == form(stored) && a.scale() == s.scale() {
        return Ok(values);
    }
    let reason = format!(
        "it is of rank {}, alpha {}, on {:?} of layers {:?}; the flags ask for rank {}, alpha {}, on {:?} of layers {:?}",
        s.rank, s.alpha, s.targets, s.blocks, a.rank, a.alpha, a.targets, a.blocks
    );
    Err(Error::Invalid { what: "--resume-adapter-file".into(), reason })
}

/// What `adapter_config.json` calls the model: as it was named, or its folder's place.
fn base_name(model: &str, folder: &Path) -> String {
    if Path::new(model).is_dir() {
        return folder.canonicalize().unwrap_or(folder.into()).display().to_string();
    }
    model.into()
}

/// The command that was given, with the checkpoint.
fn how_to_go_on(folder: &Path) -> String {
    let mut words: Vec<OsString> = Vec::new();
    let mut given = std::env::args_os().skip(1);
    while let Some(word) = given.next() {
        match word.to_str() {
            Some("--overwrite" | "--json") => {}
            Some("--resume" | "--resume-adapter-file") => _ = given.next(),
            Some(w) if w.starts_with("--resume=") || w.starts_with("--resume-adapter-file=") => {}
            _ => words.push(word),
        }
    }
    words.extend(["--resume".into(), folder.into()]);
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    let word = |w: &OsString| match w.to_string_lossy() {
        w if !w.is_empty() && w.chars().all(plain) => w.into_owned(),
        w => format!("'{}'", w.replace('\'', r"'\''")),
    };
    format!("ebbtide {}", words.iter().map(word).collect::<Vec<_>>().join(" "))
}

/// A training on this machine: files in a folder, events to whoever looks.
struct NativeHost<'a> {
    show: &'a mut dyn FnMut(&Event),
    recorder: Option<Recorder>,
    witness: Witness,
    folder: PathBuf,
    base: String,
    steps: Option<(Step, Step)>,
    /// Multiply-adds, bytes and seconds of all steps but the first, which warms up.
    measured: (u64, u64, f64),
}

impl EventSink for NativeHost<'_> {
    fn event(&mut self, event: Event) {
        if let Event::Step(step) = &event {
            match &mut self.steps {
                None => self.steps = Some((*step, *step)),
                Some((_, last)) => {
                    *last = *step;
                    let (work, bytes, seconds) = &mut self.measured;
                    (*work, *bytes, *seconds) =
                        (*work + step.work, *bytes + step.streamed_bytes, *seconds + step.seconds);
                }
            }
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.event(&event);
        }
        (self.show)(&event);
    }
}

impl Host for NativeHost<'_> {
    fn witness_bytes(&mut self) -> Option<u64> {
        self.witness.peak()
    }

    fn save(&mut self, saved: &Saved<'_>) -> Result<String> {
        saved.adapter.save(&self.folder, saved.values, &self.base)?;
        make_folder(&self.folder)?;
        let path = self.folder.join(CHECKPOINT_FILE);
        save_atomically(&path, |out| out.write_all(saved.checkpoint).map_err(|e| io_error(&path, e)))?;
        Ok(self.folder.display().to_string())
    }
}
