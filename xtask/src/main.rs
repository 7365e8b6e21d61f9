//! `cargo xtask …`: sets up what is missing, then runs, tests or builds ebbtide.
//!
//! It exists so that a fresh clone needs one command and no reading. It depends on nothing but `std`, so it starts
//! within seconds, before a single dependency of the engine is compiled. It says what it does, asks nothing, and where
//! it cannot install something (another system, not root) it names the command to run and fails.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a command-line tool speaks on the terminal

mod page;
mod python;
mod serve;
mod setup;
mod shell;
mod suite;
mod web;

use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask demo  [ARGS…]   set up, then run the demo (ARGS go to `ebbtide demo`)
cargo xtask test  [FLAGS]   set up, then run every test suite
    --native-only           no browser: neither Chromium nor the wasm32 target is needed
    --browser-only          only the wasm32 build and the tests in headless Chromium
    --long                  also the tests that take minutes (EBBTIDE_LONG=1, ignored tests included)
    --adapter SUBSTRING     run the native tests on this adapter only (as EBBTIDE_ADAPTER)
    --peft                  also adapters and merged models opened by PyTorch with PEFT (1.7 GB are set up once)
    --deny                  also `cargo deny check`, if cargo-deny is installed
cargo xtask web   [FLAGS]   set up, build the page into `dist`, serve it on localhost
    --build-only            build, do not serve
    --port N                port to serve on (8000)
    --allow-origin ORIGIN   let the page read models from this origin too (may be repeated)
cargo xtask model [FOLDER]  fetch SmolLM2-135M-Instruct, a real model to try things with (and for --long)
cargo xtask bench [ARGS…]   set up, then run `ebbtide bench`
cargo xtask setup           set up everything the commands above may need, run nothing
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let result = match command.as_str() {
        "demo" | "bench" => run_ebbtide(&command, &rest),
        "test" => suite::Options::parse(&rest).and_then(|options| suite::run(&options)),
        "web" => web::Options::parse(&rest).and_then(|options| web::run(&options)),
        "model" => python::real_model(rest.first().and_then(|f| std::path::absolute(f).ok()))
            .map(|folder| shell::say(&folder.display().to_string())),
        "setup" => setup::everything(),
        "" | "help" | "-h" | "--help" => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        other => Err(shell::Failure::usage(format!("unknown command `{other}`\n\n{USAGE}"))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {}", failure.message);
            ExitCode::from(failure.status)
        }
    }
}

/// Runs the released command line of the engine, with its exit status as ours.
fn run_ebbtide(command: &str, args: &[String]) -> Result<(), shell::Failure> {
    setup::adapter()?;
    shell::cargo(["run", "--release", "--", command]).args(args).run()
}
