//! The tests that need no process and no features of their own, in one program, so that the model and what it computes with are linked once.
//! `decoders`, `growth`, `memory` and `memory_split` count what their process allocates.

mod cli;
mod commands;
mod common;
mod compression;
mod copies;
mod deaths;
mod deploy;
mod device;
mod ending;
mod events;
mod hugging_face;
mod join;
mod kept;
mod launchers;
mod local;
mod metrics;
mod native;
mod networks;
mod output;
mod parity;
mod precision;
mod reference;
mod replicas;
mod resume;
mod safety;
mod segments;
mod staleness;
mod strategies;
mod validation;
