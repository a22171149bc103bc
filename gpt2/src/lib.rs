//! GPT-2 and its training with any distributed strategy, over any communicator.
//!
//! - [`config`], [`init`], [`model`]: GPT-2 exactly, its presets, and weights that depend on (seed, tensor path) alone.
//! - [`segments`]: the model as a chain of segments whose gradients are handed out while the backward pass still runs.
//! - [`tokenizer`], [`corpus`], [`batches`]: text to tokens, and the order of batches as a function of (seed, step, row).
//! - [`strategy`]: the distributed strategies, each written once against
//!   [`Communicator`](comm_core::Communicator), with the formula of its bytes.
//! - [`precision`], [`flat`]: the types in which a model computes and values travel, and where they are.
//! - [`optim`], [`trainer`], [`checkpoint`]: AdamW and LAMB on any shard, schedules, loss scaling, the one training loop, files.
//! - [`evaluation`]: the loss of a model on a text, and its choices in multiple-choice tests.
//! - [`record`], [`memory`], [`utilization`], [`events`]: time, memory and utilisation of a run, and its curves for TensorBoard.
//! - [`run`]: the ranks of a job, over a transport of [`isocomm`].
//! - [`cli`]: the program `gpt2`.
//!
//! Everything that one rank computes depends on the seed, the text, the configuration, this program and the kind of processor (or GPU, and its
//! driver) alone: not on time, threads or chance. The kind of processor, because the crate that multiplies matrices takes its kernels by the
//! instruction sets that it finds and cuts products into blocks by the sizes of the caches, so that sums are rounded in another order:
//! `gpt2 devices` names the kernels. Strategies differ from one device by the rounding of sums in another order; over different byte
//! transports, one strategy gives the same bits.

pub mod batches;
pub mod build;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod cores;
pub mod corpus;
#[cfg(all(feature = "cube", not(feature = "fusion")))]
mod cube;
#[cfg(all(feature = "cuda", feature = "nccl"))]
pub mod cuda_memory;
pub mod devices;
pub mod dropout;
pub mod env;
mod error;
pub mod evaluation;
pub mod events;
pub mod flat;
mod fused;
pub mod init;
mod math;
pub mod memory;
pub mod model;
pub mod optim;
pub mod peak;
pub mod precision;
pub mod record;
pub mod run;
pub mod segments;
pub mod strategy;
pub mod sys;
pub mod tokenizer;
pub mod trainer;
pub mod utilization;
