//! `cargo xtask test`: every suite, one stage after the other, with a verdict for each.
//!
//! A failing stage does not hide the ones after it: all run, and the last line names each with its result. The exit
//! status is 1 if any failed. A stage that cannot run here is `skipped` with its reason, never silently left out.

use crate::page;
use crate::python;
use crate::setup;
use crate::shell::{Failure, Step, cargo, find_program, root, say};
use crate::web;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What to run.
#[derive(Debug, Default, PartialEq)]
pub struct Options {
    native_only: bool,
    browser_only: bool,
    long: bool,
    deny: bool,
    peft: bool,
    adapter: Option<String>,
}

impl Options {
    /// From the command line.
    pub fn parse(args: &[String]) -> Result<Self, Failure> {
        let mut options = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--native-only" => options.native_only = true,
                "--browser-only" => options.browser_only = true,
                "--long" => options.long = true,
                "--deny" => options.deny = true,
                "--peft" => options.peft = true,
                "--adapter" => match args.next() {
                    Some(name) => options.adapter = Some(name.clone()),
                    None => return Err(Failure::usage("--adapter wants a part of an adapter's name")),
                },
                other => match other.strip_prefix("--adapter=") {
                    Some(name) => options.adapter = Some(name.to_owned()),
                    None => {
                        return Err(Failure::usage(format!("unknown flag `{other}`; see `cargo xtask help`")));
                    }
                },
            }
        }
        if options.native_only && options.browser_only {
            return Err(Failure::usage("--native-only and --browser-only exclude each other"));
        }
        Ok(options)
    }
}

enum Verdict {
    Passed,
    Failed(String),
    Skipped(&'static str),
}

struct Report {
    stages: Vec<(&'static str, Verdict, Duration)>,
}

impl Report {
    fn stage(&mut self, name: &'static str, body: impl FnOnce() -> Result<(), Failure>) {
        say(&format!("---- {name} ----"));
        let start = Instant::now();
        let verdict = match body() {
            Ok(()) => Verdict::Passed,
            Err(failure) => Verdict::Failed(failure.message),
        };
        let time = start.elapsed();
        match &verdict {
            Verdict::Failed(why) => say(&format!("{name}: FAILED after {:.1} s: {why}", time.as_secs_f64())),
            _ => say(&format!("{name}: passed in {:.1} s", time.as_secs_f64())),
        }
        self.stages.push((name, verdict, time));
    }

    fn skip(&mut self, name: &'static str, why: &'static str) {
        say(&format!("---- {name}: skipped, {why} ----"));
        self.stages.push((name, Verdict::Skipped(why), Duration::ZERO));
    }

    fn last_line(&self) -> String {
        let stage = |(name, verdict, time): &(&str, Verdict, Duration)| match verdict {
            Verdict::Passed => format!("{name} passed ({:.0} s)", time.as_secs_f64()),
            Verdict::Failed(_) => format!("{name} FAILED ({:.0} s)", time.as_secs_f64()),
            Verdict::Skipped(why) => format!("{name} skipped ({why})"),
        };
        self.stages.iter().map(stage).collect::<Vec<_>>().join(" | ")
    }

    fn failed(&self) -> usize {
        self.stages.iter().filter(|(_, verdict, _)| matches!(verdict, Verdict::Failed(_))).count()
    }
}

/// Runs the stages that the options ask for.
pub fn run(options: &Options) -> Result<(), Failure> {
    let start = Instant::now();
    let mut report = Report { stages: Vec::new() };
    if !options.browser_only {
        native_stages(options, &mut report);
    }
    if !options.native_only {
        browser_stages(options, &mut report);
    }
    if options.deny {
        match find_program("cargo-deny") {
            Some(_) => report.stage("deny", || cargo(["deny", "check"]).run()),
            None => report.skip("deny", "cargo-deny is not installed: cargo install --locked cargo-deny"),
        }
    }
    say(&format!("{} stages in {:.0} s", report.stages.len(), start.elapsed().as_secs_f64()));
    say(&report.last_line());
    match report.failed() {
        0 => Ok(()),
        n => Err(Failure::new(format!("{n} of {} stages failed: {}", report.stages.len(), report.last_line()))),
    }
}

fn native_stages(options: &Options, report: &mut Report) {
    // Before Chromium's own stage, because SwiftShader's driver comes with it.
    report.stage("set-up", || {
        setup::adapter()?;
        if !options.native_only {
            setup::browser()?;
        }
        Ok(())
    });
    let mut model = None;
    if options.long {
        report.stage("real model", || python::real_model(None).map(|folder| model = Some(folder)));
    }
    let with_model = |step: Step| model.iter().fold(step, |step, folder| step.env("EBBTIDE_SMOLLM2", folder));
    report.stage("tests", || with_model(native_tests(options, "--workspace")).run());
    if options.peft {
        report.stage("peft", || {
            let step = cargo(["test", "--workspace", "--test", "peft", "--", "--ignored", "--test-threads=1"]);
            with_model(step).env("EBBTIDE_PEFT_PYTHON", python::peft()?).run()
        });
    }
    report.stage("doc tests", || cargo(["test", "--workspace", "--doc"]).run());

    // The same GPU tests on a second driver, and at the limits that every browser has.
    if options.adapter.is_some() {
        report.skip("swiftshader", "--adapter names one adapter");
    } else if !cfg!(target_os = "linux") {
        report.skip("swiftshader", "its driver is used on Linux only");
    } else {
        match setup::swiftshader_driver() {
            Some(driver) => report.stage("swiftshader", || {
                let step = engine_tests(options).env("VK_DRIVER_FILES", &driver);
                on_adapter(step, "SwiftShader").run()
            }),
            None if options.native_only => report.skip("swiftshader", "its driver comes with Chromium, not installed"),
            None => {
                report.stage("swiftshader", || Err(Failure::new("Chromium's vk_swiftshader_icd.json was not found")))
            }
        }
    }
    report.stage("default limits", || engine_tests(options).env("EBBTIDE_LIMITS", "default").run());
}

/// The tests of engine, kernels and ops, for a second run elsewhere. The reference tests of whole models, which are many
/// steps of the same kernels, run there in the long suite only, and the real model's not at all. Where nextest can filter, the selection stays the whole
/// workspace: one package alone has other features of its dependencies, and builds them anew for minutes.
fn engine_tests(options: &Options) -> Step {
    match (find_program("cargo-nextest").is_some(), options.long) {
        (false, _) => native_tests(options, "--package=ebbtide-tests"),
        (true, true) => {
            native_tests(options, "--workspace").args(["-E", "package(ebbtide-tests) and not binary(smollm2)"])
        }
        (true, false) => {
            native_tests(options, "--workspace").args(["-E", "package(ebbtide-tests) and not binary(/^llm_/)"])
        }
    }
}

/// The native tests of a selection: by nextest (a process per test, so process memory is a test's own) where it is
/// installed, else by cargo.
fn native_tests(options: &Options, selection: &str) -> Step {
    let nextest = find_program("cargo-nextest").is_some();
    let mut step = match nextest {
        true => cargo(["nextest", "run", "--no-fail-fast", selection]),
        false => cargo(["test", "--lib", "--bins", "--tests", "--examples", "--no-fail-fast", selection]),
    };
    if options.long {
        step = match nextest {
            true => step.args(["--run-ignored", "all", "--profile", "long"]),
            false => step.args(["--", "--include-ignored"]),
        };
        step = step.env("EBBTIDE_LONG", "1");
    }
    if let Some(adapter) = &options.adapter {
        step = on_adapter(step, adapter);
    }
    step
}

/// Names the adapter to the engine, and to the kernel tests, which use wgpu alone. A test that finds no adapter of that
/// name fails, so a stage never passes on another one.
fn on_adapter(step: Step, name: &str) -> Step {
    step.env("EBBTIDE_ADAPTER", name).env("WGPU_ADAPTER_NAME", name)
}

/// What the stages of the browser need.
struct Ready {
    tools: web::Tools,
    driver: PathBuf,
}

fn browser_stages(options: &Options, report: &mut Report) {
    let mut ready = None;
    report.stage("web set-up", || {
        ready = Some(Ready { tools: web::Tools::set_up()?, driver: setup::browser()? });
        Ok(())
    });
    let Some(ready) = ready else {
        for name in ["page", "browser", "browser kernels"] {
            report.skip(name, "the web set-up failed");
        }
        return;
    };
    report.stage("page", || page::check(web::build(&ready.tools, &[])?, &ready.tools.packages));
    report.stage("browser", || browser_tests(options, &ready, &["--package", "ebbtide-web", "--tests"]).run());
    // The bodies of the native kernel tests, on the browser's own shader compiler.
    let kernels = ["--package", "ebbtide-tests", "--test", "kernels_*"];
    report.stage("browser kernels", || browser_tests(options, &ready, &kernels).run());
}

/// Tests of one package in headless Chromium, with the browser's flags of `web/webdriver.json`.
fn browser_tests(options: &Options, ready: &Ready, selection: &[&str]) -> Step {
    let step = ready
        .tools
        .toolchain
        .cargo("test")
        .args(["--no-fail-fast"])
        .args(selection)
        .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUNNER", ready.tools.wasm_bindgen.join("wasm-bindgen-test-runner"))
        .env("CHROMEDRIVER", &ready.driver)
        .env("WASM_BINDGEN_TEST_WEBDRIVER_JSON", root().join("web/webdriver.json"))
        // SwiftShader compiles pipelines on two cores; the runner's own limit is 20 s for all tests of a file.
        .env("WASM_BINDGEN_TEST_TIMEOUT", if options.long { "3600" } else { "900" });
    if options.long { step.env("EBBTIDE_LONG", "1") } else { step }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, Failure> {
        Options::parse(&args.iter().map(|s| s.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn flags_that_exclude_each_other_or_do_not_exist_are_usage_errors() {
        for bad in [&["--native-only", "--browser-only"][..], &["--fast"], &["--adapter"]] {
            assert_eq!(parse(bad).err().map(|f| f.status), Some(2), "{bad:?}");
        }
    }

    #[test]
    fn an_adapter_is_accepted_in_both_spellings() {
        for good in [&["--adapter", "llvm"][..], &["--adapter=llvm"]] {
            assert_eq!(parse(good).ok().and_then(|o| o.adapter).as_deref(), Some("llvm"));
        }
    }

    #[test]
    fn a_failed_stage_is_counted_named_and_does_not_stop_the_next() {
        let mut report = Report { stages: Vec::new() };
        report.stage("one", || Err(Failure::new("broken")));
        report.stage("two", || Ok(()));
        report.skip("three", "not here");
        assert_eq!(report.failed(), 1);
        assert_eq!(report.last_line(), "one FAILED (0 s) | two passed (0 s) | three skipped (not here)");
    }
}
