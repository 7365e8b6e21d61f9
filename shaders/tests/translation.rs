//! Every kernel must reach Metal, DX12 and Vulkan: naga translates each here, overrides resolved, so that a shader that only
//! one backend accepts fails on any machine.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{Shader, all};
use naga::back::{self, PipelineConstants};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

/// Override sets a kernel is translated with: the defaults, and each override at each of its first values.
fn settings(shader: &Shader) -> Vec<PipelineConstants> {
    let mut sets = vec![PipelineConstants::default()];
    for item in shader.overrides {
        let last = if item.name == "OP" { op_count(shader) } else { 3 };
        for value in 0..last {
            sets.push([(item.name.to_owned(), f64::from(value))].into_iter().collect());
        }
    }
    sets
}

fn op_count(shader: &Shader) -> u32 {
    shader.source.lines().filter(|l| l.starts_with("const OP_")).count() as u32
}

fn resolved(shader: &Shader, constants: &PipelineConstants) -> (naga::Module, ModuleInfo) {
    let module = naga::front::wgsl::parse_str(shader.source).unwrap();
    let info =
        Validator::new(ValidationFlags::all(), Capabilities::SHADER_FLOAT16_IN_FLOAT32).validate(&module).unwrap();
    let entry = Some((naga::ShaderStage::Compute, "main"));
    let (module, info) = back::pipeline_constants::process_overrides(&module, &info, entry, constants)
        .unwrap_or_else(|e| panic!("{} with {constants:?}: {e}", shader.name));
    (module.into_owned(), info.into_owned())
}

fn each(mut check: impl FnMut(&Shader, &naga::Module, &ModuleInfo) -> Result<(), String>) {
    assert!(!all().is_empty());
    for shader in all() {
        for constants in settings(shader) {
            let (module, info) = resolved(shader, &constants);
            check(shader, &module, &info).unwrap_or_else(|e| panic!("{} with {constants:?}: {e}", shader.name));
        }
    }
}

#[test]
fn every_kernel_translates_to_spirv() {
    each(|_, module, info| {
        let words =
            back::spv::write_vec(module, info, &back::spv::Options::default(), None).map_err(|e| e.to_string())?;
        if words.is_empty() { Err("empty module".into()) } else { Ok(()) }
    });
}

#[test]
fn every_kernel_translates_to_metal() {
    let options = back::msl::Options { fake_missing_bindings: true, lang_version: (2, 4), ..Default::default() };
    each(|_, module, info| {
        let pipeline = back::msl::PipelineOptions::default();
        let (text, reflected) =
            back::msl::write_string(module, info, &options, &pipeline).map_err(|e| e.to_string())?;
        for name in reflected.entry_point_names {
            name.map_err(|e| e.to_string())?;
        }
        if text.contains("kernel void") { Ok(()) } else { Err("no kernel in the output".into()) }
    });
}

#[test]
fn every_kernel_translates_to_hlsl() {
    let options = back::hlsl::Options { fake_missing_bindings: true, ..Default::default() };
    each(|_, module, info| {
        let mut text = String::new();
        let pipeline = back::hlsl::PipelineOptions::default();
        let mut writer = back::hlsl::Writer::new(&mut text, &options, &pipeline);
        let reflected = writer.write(module, info, None).map_err(|e| e.to_string())?;
        for name in reflected.entry_point_names {
            name.map_err(|e| e.to_string())?;
        }
        if text.contains("numthreads") { Ok(()) } else { Err("no kernel in the output".into()) }
    });
}

#[test]
fn no_kernel_uses_what_would_break_the_promise_of_equal_bits() {
    for shader in all() {
        for line in shader.source.lines() {
            let code = line.split("//").next().unwrap_or_default();
            for forbidden in ["dot(", "subgroup", "enable ", "pack2x16float("] {
                let found = code.match_indices(forbidden).any(|(at, _)| !code[..at].ends_with("un"));
                assert!(!found, "{}: `{forbidden}` in `{line}`", shader.name);
            }
        }
    }
}

#[test]
fn reduce_and_its_small_form_share_parameters_and_codes() {
    use ebbtide_shaders::{reduce, reduce_op, reduce_small, reduce_small_op};
    assert_eq!(size_of::<reduce::Params>(), size_of::<reduce_small::Params>());
    let codes = [reduce_op::SUM, reduce_op::MEAN, reduce_op::MAX, reduce_op::ARGMAX];
    assert_eq!(codes, [reduce_small_op::SUM, reduce_small_op::MEAN, reduce_small_op::MAX, reduce_small_op::ARGMAX]);
}

#[test]
fn the_generated_host_side_follows_the_shader() {
    use ebbtide_shaders::{Access, matmul};
    let shader = &matmul::SHADER;
    assert_eq!(shader.workgroup_size, [8, 8, 1]);
    assert_eq!(shader.params_size as usize, size_of::<matmul::Params>());
    assert_eq!(shader.params_size % 16, 0);
    let names: Vec<_> = shader.bindings.iter().map(|b| (b.binding, b.name, b.access)).collect();
    let read = Access::Read;
    assert_eq!(names, [(1, "a", read), (2, "b", read), (3, "bias", read), (4, "c", Access::ReadWrite)]);
    assert_eq!(core::mem::offset_of!(matmul::Params, alpha), 25 * 4);
}
