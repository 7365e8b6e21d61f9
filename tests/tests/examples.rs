//! The library's examples, run for real.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::duplicate_mod)]

#[path = "../../core/examples/custom_function.rs"]
mod custom_function;
#[path = "../../core/examples/lora.rs"]
mod lora;
#[path = "../../core/examples/stream_automatic.rs"]
mod stream_automatic;
#[path = "../../core/examples/stream_by_hand.rs"]
mod stream_by_hand;

#[test]
fn the_founding_program_by_hand_runs() {
    stream_by_hand::main().unwrap();
}

#[test]
fn the_founding_program_runs_automatically() {
    stream_automatic::main().unwrap();
}

#[test]
fn a_custom_function_with_hooks_runs() {
    custom_function::main().unwrap();
}

#[test]
fn lora_on_two_layers_learns() {
    lora::main().unwrap();
}
