//! A folder and the command, for tests of the command line.
#![allow(dead_code, missing_docs, reason = "each test uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A folder of a test's own.
pub struct Place(pub tempfile::TempDir);

impl Place {
    pub fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    /// The command, with temporary files and caches in the test's folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let temporary = self.0.path().join("tmp");
        std::fs::create_dir_all(&temporary).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ebbtide"));
        command.args(args).env("TMPDIR", &temporary).env("TEMP", &temporary);
        command.env("EBBTIDE_CACHE", self.0.path().join("cache")).current_dir(self.0.path());
        command
    }

    /// Runs the command with its temporary files in a folder of the test's, which must be empty again afterwards.
    pub fn run(&self, args: &[&str]) -> Output {
        let out = self.command(args).output().unwrap();
        let temporary = self.0.path().join("tmp");
        let left: Vec<_> = std::fs::read_dir(&temporary).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(left.is_empty(), "{args:?} left {left:?}");
        out
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The one JSON object that was printed.
pub fn json(out: &Output) -> Value {
    let lines: Vec<&str> = std::str::from_utf8(&out.stdout).unwrap().lines().collect();
    assert_eq!(lines.len(), 1, "one object and nothing else: {lines:?}");
    serde_json::from_str(lines[0]).unwrap()
}
