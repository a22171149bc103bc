//! GPT-2 and its training, over any communicator.

pub mod batches;
pub mod checkpoint;
pub mod config;
pub mod corpus;
mod cross_entropy;
pub mod env;
mod fused;
pub mod init;
mod math;
pub mod model;
pub mod optim;
pub mod segments;
pub mod splitmix;
pub mod sys;
pub mod tokenizer;
pub mod cli;
pub mod devices;
pub mod memory;
pub mod peak;
pub mod run;
pub mod strategy;
pub mod trainer;
pub mod transports;
