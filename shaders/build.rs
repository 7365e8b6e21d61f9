//! Checks every `wgsl/*.wgsl` with naga and writes the host's view of it: `Params`, bindings, workgroup size, overrides.
//!
//! Without this, host and shader would each hold a copy of the same layout and drift apart silently. An error in a shader
//! stops the build with file, line and column.
#![allow(clippy::print_stderr, reason = "a build script reports through stderr")]

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, ArraySize, Literal, Module, ScalarKind, StorageAccess, TypeInner, VectorSize};

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match generate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn generate() -> Outcome<()> {
    println!("cargo::rerun-if-changed=wgsl");
    println!("cargo::rerun-if-changed=build.rs");
    let folder = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("wgsl");
    let mut files: Vec<PathBuf> =
        fs::read_dir(&folder)?.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    files.retain(|f| f.extension().is_some_and(|x| x == "wgsl"));
    files.sort();

    let mut code = String::new();
    let mut names = Vec::new();
    let mut errors = String::new();
    for file in &files {
        match shader_module(file) {
            Ok((name, text)) => {
                code.push_str(&text);
                names.push(name);
            }
            Err(e) => writeln!(errors, "{e}")?,
        }
    }
    if !errors.is_empty() {
        return Err(errors.into());
    }
    writeln!(code, "static ALL: [&Shader; {}] = [", names.len())?;
    for name in &names {
        writeln!(code, "    &{name}::SHADER,")?;
    }
    writeln!(
        code,
        "];\n/// Every kernel, sorted by name.\npub fn all() -> &'static [&'static Shader] {{\n    &ALL\n}}"
    )?;
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("generated.rs"), code)?;
    Ok(())
}

/// One shader file → its name and the Rust module that describes it.
fn shader_module(file: &Path) -> Outcome<(String, String)> {
    let source = fs::read_to_string(file)?;
    let shown = file.display().to_string();
    let name = file.file_stem().and_then(|s| s.to_str()).ok_or("file name is not UTF-8")?.to_owned();
    let module = naga::front::wgsl::parse_str(&source)
        .map_err(|e| located(file, &source, e.location(&source), &e.emit_to_string_with_path(&source, &shown)))?;
    // Only what plain WebGPU has: `unpack2x16float` counts as a capability of its own in naga, but is core WGSL.
    let info = Validator::new(ValidationFlags::all(), Capabilities::SHADER_FLOAT16_IN_FLOAT32)
        .validate(&module)
        .map_err(|e| located(file, &source, e.location(&source), &e.emit_to_string_with_path(&source, &shown)))?;
    drop(info);

    let describe = || -> Outcome<String> { Describe { module: &module, source: &source, name: &name }.text(file) };
    let text = describe().map_err(|e| format!("{shown}:1:1: {e}"))?;
    Ok((name, text))
}

fn located(file: &Path, source: &str, at: Option<naga::SourceLocation>, report: &str) -> String {
    let Some(at) = at else {
        return format!("{}:1:1: error\n{report}", file.display());
    };
    let line = source.lines().nth(at.line_number.saturating_sub(1) as usize).unwrap_or_default();
    format!("{}:{}:{}: error\n    {line}\n{report}", file.display(), at.line_number, at.line_position)
}

struct Describe<'a> {
    module: &'a Module,
    source: &'a str,
    name: &'a str,
}

impl Describe<'_> {
    fn text(&self, file: &Path) -> Outcome<String> {
        let [entry] = self.module.entry_points.as_slice() else {
            return Err("a kernel has exactly one entry point".into());
        };
        if entry.name != "main" || entry.stage != naga::ShaderStage::Compute {
            return Err("the entry point is `@compute fn main`".into());
        }
        if entry.workgroup_size_overrides.is_some_and(|o| o.iter().any(Option::is_some)) {
            return Err("the workgroup size is part of the kernel and not an override".into());
        }
        let [x, y, z] = entry.workgroup_size;
        if x * y * z > 256 {
            return Err("more than 256 invocations a workgroup, WebGPU's default limit".into());
        }
        let workgroup_bytes = self.workgroup_bytes()?;
        if workgroup_bytes > 16 * 1024 {
            return Err(format!("{workgroup_bytes} bytes of workgroup memory, WebGPU's default limit is 16384").into());
        }
        let (params, params_size) = self.params()?;
        let mut out = String::new();
        writeln!(out, "/// Host side of `{}.wgsl`, generated from it.", self.name)?;
        writeln!(out, "pub mod {} {{", self.name)?;
        out.push_str(&params);
        writeln!(out, "    /// What the host must know of `{}.wgsl`.", self.name)?;
        writeln!(out, "    pub static SHADER: crate::Shader = crate::Shader {{")?;
        writeln!(out, "        name: {:?},", self.name)?;
        writeln!(out, "        source: include_str!({:?}),", file.display().to_string())?;
        writeln!(out, "        workgroup_size: [{x}, {y}, {z}],")?;
        writeln!(out, "        params_size: {params_size},")?;
        writeln!(out, "        bindings: &[{}],", self.bindings()?)?;
        writeln!(out, "        overrides: &[{}],", self.overrides()?)?;
        writeln!(out, "        workgroup_bytes: {workgroup_bytes},")?;
        writeln!(out, "    }};\n}}\n")?;
        out.push_str(&self.op_codes()?);
        Ok(out)
    }

    /// `const OP_ADD: u32 = 1u; // a + b` becomes `NAME_op::ADD`: the codes exist once, in the shader.
    fn op_codes(&self) -> Outcome<String> {
        let mut out = String::new();
        for line in self.source.lines().filter(|l| l.starts_with("const OP_")) {
            let parts = line.strip_prefix("const OP_").and_then(|l| l.split_once(": u32 = "));
            let split = parts.and_then(|(op, rest)| Some((op, rest.split_once("u; // ")?)));
            let Some((op, (value, doc))) = split else {
                return Err(format!("`{line}`: want `const OP_X: u32 = Nu; // what it does`").into());
            };
            writeln!(out, "    /// {doc}\n    pub const {op}: u32 = {value};")?;
        }
        if out.is_empty() {
            return Ok(out);
        }
        Ok(format!("/// Values of the override `OP` of `{0}.wgsl`.\npub mod {0}_op {{\n{out}}}\n", self.name))
    }

    fn workgroup_bytes(&self) -> Outcome<u32> {
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(self.module.to_ctx())?;
        let of = self.module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
        Ok(of.map(|(_, v)| layouter[v.ty].size).sum())
    }

    fn bindings(&self) -> Outcome<String> {
        let mut found = Vec::new();
        for (_, var) in self.module.global_variables.iter() {
            let AddressSpace::Storage { access } = var.space else {
                continue;
            };
            let binding = var.binding.as_ref().ok_or("a storage variable without binding")?;
            let name = var.name.as_deref().ok_or("a storage variable without name")?;
            if binding.group != 0 || binding.binding == 0 {
                return Err(format!("`{name}`: storage stands in group 0 at bindings 1 and up").into());
            }
            let line = self.source.lines().find(|l| l.starts_with(&format!("@group(0) @binding({})", binding.binding)));
            if !line.is_some_and(|l| l.contains("//")) {
                return Err(format!("`{name}`: the binding's line ends with a comment that gives its shape").into());
            }
            found.push((binding.binding, name, access.contains(StorageAccess::STORE)));
        }
        found.sort_unstable();
        if found.len() > 8 {
            return Err("more than 8 storage bindings, WebGPU's default limit".into());
        }
        let mut out = String::new();
        for (binding, name, write) in found {
            let access = if write { "ReadWrite" } else { "Read" };
            write!(out, "crate::Binding {{ binding: {binding}, name: {name:?}, access: crate::Access::{access} }}, ")?;
        }
        Ok(out)
    }

    fn overrides(&self) -> Outcome<String> {
        let mut out = String::new();
        for (_, item) in self.module.overrides.iter() {
            let name = item.name.as_deref().ok_or("an override without name")?;
            let init = item.init.map(|h| &self.module.global_expressions[h]);
            let Some(naga::Expression::Literal(literal)) = init else {
                return Err(format!("override `{name}`: needs a literal default").into());
            };
            let value = match *literal {
                Literal::U32(v) => f64::from(v),
                Literal::I32(v) => f64::from(v),
                Literal::F32(v) => f64::from(v),
                Literal::Bool(v) => f64::from(u8::from(v)),
                _ => return Err(format!("override `{name}`: u32, i32, f32 or bool").into()),
            };
            write!(out, "crate::Override {{ name: {name:?}, default: {value:?} }}, ")?;
        }
        Ok(out)
    }

    /// The Rust struct equal to the WGSL `Params`, padding made explicit, and its size.
    fn params(&self) -> Outcome<(String, u32)> {
        let uniform = self.module.global_variables.iter().find(|(_, v)| v.space == AddressSpace::Uniform);
        let (_, var) = uniform.ok_or("no uniform")?;
        if var.binding.as_ref().is_none_or(|b| b.group != 0 || b.binding != 0) {
            return Err("the uniform stands at @group(0) @binding(0)".into());
        }
        let TypeInner::Struct { ref members, span } = self.module.types[var.ty].inner else {
            return Err("the uniform is a struct".into());
        };
        let mut out = String::new();
        writeln!(out, "    /// The uniform block of `{}.wgsl`.", self.name)?;
        writeln!(
            out,
            "    #[repr(C)]\n    #[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]"
        )?;
        writeln!(out, "    pub struct Params {{")?;
        let mut at = 0;
        let mut pads = 0;
        let mut pad = |out: &mut String, at: u32, to: u32| -> Outcome<()> {
            if to > at {
                writeln!(out, "        #[doc(hidden)]\n        pub _pad{pads}: [u32; {}],", (to - at) / 4)?;
                pads += 1;
            }
            Ok(())
        };
        for (i, member) in members.iter().enumerate() {
            let name = member.name.as_deref().ok_or("a member without name")?;
            let expected = ["first_group", "groups"].get(i);
            if expected.is_some_and(|e| *e != name) {
                return Err("Params begins with `first_group: u32, groups: u32`".into());
            }
            let (rust, size) = self.rust_type(member.ty).ok_or(format!("member `{name}`: type not supported"))?;
            let doc = self.member_comment(name).ok_or(format!("member `{name}`: no comment on its line"))?;
            pad(&mut out, at, member.offset)?;
            writeln!(out, "        /// {doc}\n        pub {name}: {rust},")?;
            at = member.offset + size;
        }
        let size = span.next_multiple_of(16);
        pad(&mut out, at, size)?;
        writeln!(out, "    }}\n    const _: () = assert!(core::mem::size_of::<Params>() == {size});")?;
        Ok((out, size))
    }

    fn rust_type(&self, ty: naga::Handle<naga::Type>) -> Option<(String, u32)> {
        let scalar = |s: naga::Scalar| match (s.kind, s.width) {
            (ScalarKind::Uint, 4) => Some("u32"),
            (ScalarKind::Sint, 4) => Some("i32"),
            (ScalarKind::Float, 4) => Some("f32"),
            _ => None,
        };
        match self.module.types[ty].inner {
            TypeInner::Scalar(s) => Some((scalar(s)?.to_owned(), 4)),
            TypeInner::Vector { size: VectorSize::Quad, scalar: s } => Some((format!("[{}; 4]", scalar(s)?), 16)),
            TypeInner::Array { base, size: ArraySize::Constant(n), stride: 16 } => {
                let (of, _) = self.rust_type(base).filter(|(_, bytes)| *bytes == 16)?;
                Some((format!("[{of}; {n}]"), 16 * n.get()))
            }
            _ => None,
        }
    }

    /// The comment behind a member of `Params`: it becomes the field's documentation.
    fn member_comment(&self, member: &str) -> Option<String> {
        let body = self.source.split_once("struct Params {")?.1.split_once('}')?.0;
        let line = body.lines().find(|l| l.trim_start().starts_with(&format!("{member}:")))?;
        Some(line.split_once("//")?.1.trim().replace('[', "\\[").replace(']', "\\]"))
    }
}
