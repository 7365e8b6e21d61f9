//! Language models: configurations, families, adapters, and the programs of a session. Nothing above knows the engine's
//! insides; nothing below knows that there are language models.

pub mod adapters;
pub mod config;
pub mod data;
pub mod fuse;
pub mod generate;
pub mod generator;
pub mod hub;
pub mod models;
pub mod programs;
pub mod run;
pub mod schedule;
pub mod template;
pub mod tokenizer;
pub mod trainer;
