//! Running other programs, with the command shown before it runs.
//!
//! Every step a developer might want to repeat by hand is printed as a line that can be pasted into a shell. Children
//! inherit the terminal, so the summary lines of cargo and nextest arrive unchanged.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Why a command ended: what to tell the user, and the exit status.
#[derive(Debug)]
pub struct Failure {
    /// Said once, at the end.
    pub message: String,
    /// 1 failed while running, 2 bad usage; a child's own status where there was one.
    pub status: u8,
}

impl Failure {
    /// A step failed.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: 1 }
    }

    /// The command line was not understood.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: 2 }
    }
}

/// The workspace root: xtask's own folder is directly below it.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Cargo's target directory, honouring `CARGO_TARGET_DIR`.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// A program to run in the workspace root.
pub struct Step {
    command: Command,
    shown_env: String,
}

/// The cargo that runs us (rustup's, at the pinned version).
pub fn cargo<const N: usize>(args: [&str; N]) -> Step {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    step(cargo).args(args)
}

/// Any other program.
pub fn step(program: impl AsRef<OsStr>) -> Step {
    let mut command = Command::new(program);
    command.current_dir(root());
    // What `cargo run` told *us* about our package would be wrong for the children.
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    if let Some(dir) = runtime_dir() {
        command.env("XDG_RUNTIME_DIR", dir);
    }
    Step { command, shown_env: String::new() }
}

impl Step {
    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets an environment variable, shown in front of the command.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.shown_env.push_str(&format!("{name}={} ", quote(&value.as_ref().to_string_lossy())));
        self.command.env(name, value);
        self
    }

    /// Sets an environment variable without showing it.
    pub fn quiet_env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Unsets an environment variable.
    pub fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    /// The command as a line for a shell.
    fn line(&self) -> String {
        let program = Path::new(self.command.get_program());
        // Cargo is called by its full path; the name is what one would type.
        let program = match program.file_name() {
            Some(name) if program.is_absolute() && name.to_string_lossy().starts_with("cargo") => name,
            _ => program.as_os_str(),
        };
        let words = std::iter::once(program).chain(self.command.get_args());
        let words: Vec<String> = words.map(|word| quote(&word.to_string_lossy())).collect();
        format!("{}{}", self.shown_env, words.join(" "))
    }

    /// Shows the command and runs it; anything but success is a failure with the child's exit status.
    pub fn run(mut self) -> Result<(), Failure> {
        let line = self.line();
        say(&format!("$ {line}"));
        let status = self.command.status().map_err(|e| Failure::new(format!("could not start `{line}`: {e}")))?;
        if status.success() {
            return Ok(());
        }
        let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        Err(Failure { message: format!("`{line}` ended with {status}"), status: code.max(1) })
    }

    /// Runs silently and returns what was printed, or nothing if it failed.
    pub fn output(mut self) -> Option<String> {
        let output = self.command.stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// One line of ours, told apart from the output of the children.
pub fn say(text: &str) {
    println!("xtask: {text}");
}

/// Whether a program of this name can be started.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let file = if cfg!(windows) { format!("{name}.exe") } else { name.to_owned() };
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(&file)).find(|path| path.is_file())
}

/// A private folder for the Vulkan loader where the session has none, which silences its warning.
fn runtime_dir() -> Option<PathBuf> {
    if !cfg!(target_os = "linux") || std::env::var_os("XDG_RUNTIME_DIR").is_some() {
        return None;
    }
    let dir = target_dir().join("tmp").join("xdg");
    std::fs::create_dir_all(&dir).ok()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700)).ok()?;
    }
    Some(dir)
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_command_can_be_pasted_into_a_shell() {
        let step = step("echo").args(["a b", "c'd", "plain"]).env("X", "1 2");
        assert_eq!(step.line(), r"X='1 2' echo 'a b' 'c'\''d' plain");
    }

    #[test]
    #[cfg(unix)]
    fn the_exit_status_of_a_child_is_passed_on() {
        let failure = step("sh").args(["-c", "exit 7"]).run().err();
        assert_eq!(failure.map(|f| f.status), Some(7));
        assert!(step("sh").args(["-c", "exit 0"]).run().is_ok());
    }

    #[test]
    fn a_program_that_does_not_exist_is_a_failure_with_its_name() {
        let failure = step("no-such-program-of-ours").run().err();
        assert!(failure.is_some_and(|f| f.message.contains("no-such-program-of-ours")));
    }
}
